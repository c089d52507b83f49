"""Tensors that a run has saved in full: where they are, and what they must be like when read."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tocsin.schemas.records.events import EVENT_TYPES, Model, example
from tocsin.schemas.records.fields import Many, Step, Text, Whole, Word
from tocsin.schemas.records.runs import RunData


class SavedTensor(Model):
    """One tensor of the file."""

    name: Word = Field(max_length=500, examples=["blocks.0.mlp.weight"])
    shape: Many[Whole] = Field(examples=[[256, 1024]])
    dtype: Word = Field(
        max_length=32, description="PyTorch's name of the type", examples=["bfloat16"]
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="SHA-256 of the numbers in memory, little-endian, row by row"
    )


@EVENT_TYPES.register
class TensorsSaved(RunData):
    """A rank has written tensors of one collection at one step to a safetensors file."""

    model_config = example(
        run_id="gpt-2026-11-21",
        incarnation="0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11",
        collection="gradients",
        step=500,
        uri="s3://ml-runs/tocsin/run=gpt-2026-11-21/tensors/incarnation=0d9f/gradients-step500-rank0"
        ".safetensors",
        path="run=gpt-2026-11-21/tensors/incarnation=0d9f/gradients-step500-rank0.safetensors",
        size_bytes=1048680,
        tensors=[
            {
                "name": "blocks.0.mlp.weight",
                "shape": [256, 1024],
                "dtype": "float32",
                "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            }
        ],
    )

    event_type: ClassVar[str] = "tocsin.run.tensors_saved"

    collection: str = Field(max_length=64)
    step: Step
    uri: Text = Field(description="URI of the file, as seen by the rank that wrote it")
    path: Text = Field(description="path of the file, relative to the root of the store")
    size_bytes: Whole = Field(
        description="size of the file; 0 in further records about the same file"
    )
    tensors: Many[SavedTensor] = Field(description="at most 1,000 in one record")
