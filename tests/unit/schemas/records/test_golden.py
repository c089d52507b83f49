"""Each record that was ever written stays readable: one file per (type, version), never edited.

Nothing in this repository writes these files. A record whose meaning changes gets a new type or a
new major version, and a file of its own beside the old one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tocsin.schemas.errors import SignatureError
from tocsin.schemas.records.checkpoints import (
    Checkpoint,
    CheckpointPinned,
    CheckpointRead,
    CheckpointWritten,
)
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.dead_letters import DeadLetter
from tocsin.schemas.records.deliveries import Attempt, Delivery
from tocsin.schemas.records.digests import Digest, DigestRun
from tocsin.schemas.records.events import EVENT_TYPES, Data, Event
from tocsin.schemas.records.feedback import (
    FeedbackAcknowledged,
    FeedbackFalseAlarm,
    FeedbackResolved,
)
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import (
    Evidence,
    Fact,
    IssueFiring,
    IssueOngoing,
    IssueResolved,
    Series,
    Subject,
)
from tocsin.schemas.records.program_facts import (
    LayerInputsSeen,
    LossInputsSeen,
    ModeSeen,
    OptimizersSeen,
    TrainingPlanned,
)
from tocsin.schemas.records.quarantines import RuleReleased
from tocsin.schemas.records.run_view import RankView, RunView, StopView
from tocsin.schemas.records.runs import (
    CaptureDegraded,
    CaptureFigures,
    DataLoaderSeen,
    Group,
    Heartbeat,
    PhaseMark,
    RunEnded,
    RunStarted,
)
from tocsin.schemas.records.saved_tensors import SavedTensor, TensorsSaved
from tocsin.schemas.records.silences import SilenceSet
from tocsin.schemas.records.snapshots import Snapshot
from tocsin.schemas.records.stops.commands import (
    DetailRequest,
    SignedDatagram,
    StopAcknowledged,
    StopCheckpoint,
    StopEscalated,
    StopExited,
    StopExpired,
    StopLeft,
    StopRefused,
    StopRequested,
)
from tocsin.schemas.records.stops.control import StopAnswered, StopsSwitched
from tocsin.schemas.records.wire import Meta, decode, read_meta
from tocsin.schemas.signing import Signature, TrustedKeys

GOLDEN = Path(__file__).parents[3] / "golden"
RUN, INCARNATION = "gpt-2026-11-21", "0d9f2f4e-6f0a-5a53-9f0c-0c6f3f2f8a11"
ISSUE, COMMAND = "b1c5a1de-3b0f-5d0e-8a35-6a4c1c1f9d27", "7f8a4a1c-9f3b-5a2b-8a55-5b0c0c2b7d11"
CHECKPOINT = Checkpoint(path="/data/gpt/step-1000.pt", step=1000, size_bytes=1493172224)
FIGURES = CaptureFigures(
    overhead_percent=0.25, records=2411, dropped=3, degraded=("weights: over the budget",)
)

ISSUE_FIELDS = {
    "run_id": RUN,
    "incarnation": INCARNATION,
    "rank": 1,
    "world_size": 2,
    "issue_id": ISSUE,
    "rule": "nonfinite",
    "use": "nonfinite",
    "rule_version": 1,
    "severity": "critical",
    "stop_worthy": True,
    "subject": Subject(kind="tensor", name="blocks.3.attention.qkv.weight", collection="gradients"),
    "reason": "NaN in 12 of 1,769,472 gradients of blocks.3.attention.qkv.weight",
    "remedy": "look at the batch of step 1200",
    "first_step": 1200,
    "first_rank": 1,
    "step": 1201,
    "onset_ms": 1795258012250,
    "at_ms": 1795258012290,
    "labels": {"team": "vision"},
    "evidence": Evidence(
        facts=(
            Fact(name="nans", value=12.0),
            Fact(name="ratio", value=math.inf, limit=20.0, unit="times"),
            Fact(name="device", value="cuda:1"),
        ),
        series=Series(
            name="loss", unit="nats", steps=(1199, 1200), values=(2.75, math.nan), limit=8.5
        ),
        followed=2,
        also=("blocks.3.attention.proj.weight", "blocks.2.mlp.weight"),
        explanation="the first in backward order",
    ),
    "last_good_checkpoint": CHECKPOINT,
    "consequence_of": "e3f1d9c4-7a52-5bb1-9d9f-0d3b9e1c5a02",
}

FEEDBACK = {
    "feedback_id": "5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
    "by": "ana@node-1",
    "at_ms": 1795258072300,
    "issue": IssueFiring.model_validate(ISSUE_FIELDS),
}

EVENTS: dict[str, Data] = {
    "tocsin.run.started-v1": RunStarted(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        role="trainer",
        job_id="slurm-4711",
        restart_count=1,
        training=2,
        labels={"team": "vision", "name": "größe"},
        node="node-17",
        pid=31337,
        command="python train.py --lr 3e-4",
        folder="/home/ana/gpt",
        git_commit="9df90d1",
        versions={"python": "3.11.9", "torch": "2.15.0"},
        optimizer="AdamW",
        optimizers=1,
        groups=(Group(index=0, parameters=148, lr=0.0003),),
        tensors=148,
        parameters=124439808,
        collections=("gradients", "weights"),
        heartbeat_s=10.0,
        stop="trusted_key",
    ),
    "tocsin.run.ended-v1": RunEnded(
        run_id=RUN,
        incarnation=INCARNATION,
        role="launcher",
        outcome="stopped",
        exit_code=79,
        reason="stopped for nonfinite",
        last_step=1203,
        duration_s=412.5,
        capture=FIGURES,
    ),
    "tocsin.run.tensors_saved-v1": TensorsSaved(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        collection="gradients",
        step=1200,
        uri="file:///data/store/run=gpt/tensors/gradients-step1200-rank1.safetensors",
        path="run=gpt/tensors/gradients-step1200-rank1.safetensors",
        size_bytes=4112,
        tensors=(
            SavedTensor(
                name="blocks.0.mlp.weight", shape=(32, 32), dtype="float32", sha256="0a" * 32
            ),
        ),
    ),
    "tocsin.run.heartbeat-v1": Heartbeat(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        last_step=1200,
        steps_in_flight=True,
        busy="evaluation",
        forward_calls=1202,
        capture=FIGURES,
    ),
    "tocsin.run.phase-v1": PhaseMark(
        run_id=RUN,
        incarnation=INCARNATION,
        name="evaluation",
        edge="end",
        step=1000,
        duration_s=12.25,
    ),
    "tocsin.run.checkpoint-v1": CheckpointWritten(
        run_id=RUN,
        incarnation=INCARNATION,
        checkpoint=CHECKPOINT.model_copy(update={"finite": True}),
        duration_s=3.5,
    ),
    "tocsin.run.checkpoint_pinned-v1": CheckpointPinned(
        run_id=RUN,
        incarnation=INCARNATION,
        checkpoint=CHECKPOINT,
        how="copy",
        pinned="/data/gpt/tocsin-pinned/step-1000.pt",
    ),
    "tocsin.run.checkpoint_read-v1": CheckpointRead(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        checkpoint=CHECKPOINT,
        complete=False,
        tensors=444,
        matrices=148,
        bytes_read=4294967296,
        nonfinite=("model.blocks.3.attention.weight",),
        nonfinite_tensors=1,
        zeros=("model.head.weight",),
        zero_tensors=1,
    ),
    "tocsin.run.data_loader-v1": DataLoaderSeen(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        mode="train",
        workers=4,
        pin_memory=True,
        prefetch_factor=2,
        batch_size=64,
        dataset="ImageFolder",
        samples=1281167,
        cores=32,
        gpu=True,
        step=0,
    ),
    "tocsin.run.loss_inputs-v1": LossInputsSeen(
        run_id=RUN,
        incarnation=INCARNATION,
        function="cross_entropy",
        made_by="softmax",
        step=2,
        rows=64,
        classes=10,
        minimum=0.0004,
        maximum=0.91,
        row_sum_min=0.9999998,
        row_sum_max=1.0000001,
        exp_sum_min=10.61,
        exp_sum_max=11.41,
        spread=0.118,
    ),
    "tocsin.run.layer_inputs-v1": LayerInputsSeen(
        run_id=RUN,
        incarnation=INCARNATION,
        layer="features.0",
        kind="Conv2d",
        step=1,
        values=16384,
        minimum=0.0,
        maximum=255.0,
        mean=112.7,
        std=66.2,
        sample_std=65.1,
        whole_numbers=True,
    ),
    "tocsin.run.mode-v1": ModeSeen(
        run_id=RUN,
        incarnation=INCARNATION,
        doing="evaluation",
        layers_in="train",
        layers=3,
        first="features.1",
        kind="BatchNorm2d",
        step=499,
    ),
    "tocsin.run.planned-v1": TrainingPlanned(
        run_id=RUN,
        incarnation=INCARNATION,
        total_steps=10_000,
        done_steps=4_000,
        source="transformers",
    ),
    "tocsin.run.optimizers-v1": OptimizersSeen(
        run_id=RUN, incarnation=INCARNATION, optimizers=2, losses=1, step=1
    ),
    "tocsin.run.capture_degraded-v1": CaptureDegraded(
        run_id=RUN, incarnation=INCARNATION, probe="weights", reason="over the budget", step=400
    ),
    "tocsin.run.view-v1": RunView(
        run_id=RUN,
        incarnation=INCARNATION,
        world_size=2,
        state="ended",
        labels={"team": "vision"},
        node="node-17",
        command="python train.py",
        started_ms=1795257600000,
        ended_ms=1795258013100,
        outcome="stopped",
        exit_code=79,
        last_step=1203,
        last_loss=math.nan,
        ranks=(
            RankView(
                rank=0, last_step=1203, last_heard_ms=1795258012990, ended=True, capture=FIGURES
            ),
            RankView(rank=1, last_heard_ms=1795258012980),
        ),
        rules={"nonfinite": "stopped", "loss_diverged": "no_issues_found"},
        issues=1,
        stop=StopView(
            state="exited",
            command_id=COMMAND,
            issue_id=ISSUE,
            reason="nonfinite",
            step=1203,
            how="edge",
            exit_code=79,
            states={"requested": 1795258012300, "exited": 1795258013100},
        ),
        capture=FIGURES,
        next_offset=48213,
    ),
    "tocsin.issue.firing-v1": IssueFiring.model_validate(ISSUE_FIELDS),
    "tocsin.issue.ongoing-v1": IssueOngoing.model_validate(ISSUE_FIELDS),
    "tocsin.issue.resolved-v1": IssueResolved.model_validate(ISSUE_FIELDS),
    "tocsin.configuration.refused-v1": ConfigurationRefused(
        worker="actions@node-1",
        at_ms=1795258072300,
        problems=("tocsin.yaml:5:5: unknown rule 'größe'", "tocsin.yaml:9:1: unknown section 'x'"),
        more=3,
    ),
    "tocsin.digest-v1": Digest(
        receiver="vision-mail",
        from_ms=1795219200000,
        until_ms=1795305600000,
        runs=(
            DigestRun(run_id="gpt-1", state="running", last_step=1200, last_loss=math.nan),
            DigestRun(run_id="gpt-0", state="ended", outcome="completed"),
        ),
        more_runs=3,
        issues=2,
        open=1,
        suppressed={"silence": 2, "shadow": 1},
    ),
    "tocsin.feedback.acknowledged-v1": FeedbackAcknowledged.model_validate(FEEDBACK),
    "tocsin.feedback.resolved-v1": FeedbackResolved.model_validate(
        FEEDBACK | {"why": "restarted with a lower rate"}
    ),
    "tocsin.feedback.false_alarm-v1": FeedbackFalseAlarm.model_validate(
        FEEDBACK | {"why": "größe: a warm-up"}
    ),
    "tocsin.stops.switched-v1": StopsSwitched(
        off=True, by="ana@node-1", why="the new rule is wrong", at_ms=1795258012300
    ),
    "tocsin.stop.answered-v1": StopAnswered(
        run_id=RUN,
        incarnation=INCARNATION,
        delivery_id=COMMAND,
        verdict="reject",
        by="ana@node-1",
        why="a known spike",
        at_ms=1795258012300,
    ),
    "tocsin.rule.released-v1": RuleReleased(
        release_id="5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
        run_id=RUN,
        incarnation=INCARNATION,
        rule="loss_spike",
        by="ana@node-1",
        at_ms=1795258072300,
        why="größe: the workers have the fix",
    ),
    "tocsin.silence.set-v1": SilenceSet(
        silence_id="5b0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
        match={"run": ("sweep-*",), "rule": ("loss_spike", "nonfinite")},
        from_ms=1795258012300,
        until_ms=1795265212300,
        by="ana@node-1",
        why="größe: known bad learning rates",
        mutes=("notify", "stop"),
        set_ms=1795258012300,
    ),
    "tocsin.delivery-v1": Delivery(
        delivery_id=COMMAND,
        issue_id=ISSUE,
        run_id=RUN,
        incarnation=INCARNATION,
        rule="nonfinite",
        issue_state="firing",
        action="ml-lambda",
        kind="webhook",
        state="pending",
        reason="503 Service Unavailable",
        decided_by="tocsin.yaml:14:3",
        created_ms=1795258012300,
        updated_ms=1795258012420,
        attempts=1,
        last_attempts=(
            Attempt(
                at_ms=1795258012310, result="503 Service Unavailable", retry=True, duration_ms=104
            ),
        ),
        next_attempt_ms=1795258014420,
        give_up_ms=1795344412300,
        event={"id": f"{ISSUE}/firing/0", "data": {"values": [2.75, "NaN"]}},
    ),
    "tocsin.run.look_closer-v1": DetailRequest(
        run_id=RUN,
        incarnation=INCARNATION,
        rule="exploding_gradient",
        issue_id=ISSUE,
        steps=50,
        not_after_ms=1795258312300,
    ),
    "tocsin.stop.requested-v1": StopRequested(
        command_id=COMMAND,
        run_id=RUN,
        incarnation=INCARNATION,
        issue_id=ISSUE,
        rule="nonfinite",
        reason="NaN in the gradients",
        requested_by="actions@node-1",
        requested_ms=1795258012300,
        not_after_ms=1795258312300,
        nonce="c9b0a2f6-1a53-4bb7-8a6e-1c0e5a0d3f42",
        grace_s=20.0,
        checkpoint="protect_last_good",
        last_good_checkpoint=CHECKPOINT,
    ),
    "tocsin.stop.acknowledged-v1": StopAcknowledged(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        command_id=COMMAND,
        issue_id=ISSUE,
        step=1201,
        leave_at=1203,
    ),
    "tocsin.stop.checkpoint-v1": StopCheckpoint(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        command_id=COMMAND,
        decision="protected",
        checkpoint=CHECKPOINT,
        reason="the weights are not finite",
    ),
    "tocsin.stop.left-v1": StopLeft(
        run_id=RUN,
        incarnation=INCARNATION,
        rank=1,
        world_size=2,
        command_id=COMMAND,
        issue_id=ISSUE,
        step=1203,
        edge="optimizer_step",
        left_us=1795258012612345,
    ),
    "tocsin.stop.escalated-v1": StopEscalated(
        run_id=RUN,
        incarnation=INCARNATION,
        role="launcher",
        command_id=COMMAND,
        how="SIGTERM",
        reason="no rank left within 20 s",
    ),
    "tocsin.stop.exited-v1": StopExited(
        run_id=RUN,
        incarnation=INCARNATION,
        role="launcher",
        command_id=COMMAND,
        how="edge",
        exit_code=79,
    ),
    "tocsin.stop.refused-v1": StopRefused(
        run_id=RUN,
        incarnation=INCARNATION,
        command_id=COMMAND,
        why="other_incarnation",
        reason="it names an earlier training",
    ),
    "tocsin.stop.expired-v1": StopExpired(
        run_id=RUN,
        incarnation=INCARNATION,
        command_id=COMMAND,
        not_after_ms=1795258312300,
        reason="no rank answered",
    ),
}

FRAMES = {"tensors-v1": TensorFrame, "steps-v1": StepFrame, "system-v1": SystemFrame}
OTHERS = {"snapshot-v1", "headers-v1", "signed-command-v1", "dead-letter-v1"}


def read(name: str, suffix: str) -> bytes:
    return (GOLDEN / f"{name}{suffix}").read_bytes()


def test_each_type_and_version_has_a_golden_file() -> None:
    models = (EVENT_TYPES.model(name) for name in EVENT_TYPES.names())
    types = {f"{model.event_type}-v{model.version}" for model in models}
    types |= {f"{frame.type}-v{frame.version}" for frame in (TensorFrame, StepFrame, SystemFrame)}
    types |= {f"{Snapshot.type}-v{Snapshot.version}"}

    files = {path.stem for path in GOLDEN.iterdir()}

    assert types - files == set(), "a record without its golden file: see the head of this module"
    assert files == set(EVENTS) | set(FRAMES) | OTHERS


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_event(name: str) -> None:
    value = read(name, ".json")
    event_type = name.removesuffix("-v1")

    event = decode(Meta(event_type), value)

    assert isinstance(event, Event)
    assert event.id == "3f0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11/42"
    assert event.source == f"/runs/{RUN}/ranks/1"
    assert event.type == event_type
    assert event.time_ms == 1795258012250
    assert event.subject == "a golden record"
    assert type(event.data) is type(EVENTS[name])
    # NaN is unlike itself, so what is compared is the text; no field may be missing from either.
    assert event.data.model_dump_json() == EVENTS[name].model_dump_json()


def test_tensors() -> None:
    frame = TensorFrame.decode(read("tensors-v1", ".bin"))

    assert (frame.origin.run_id, frame.origin.incarnation) == (RUN, INCARNATION)
    assert (frame.origin.rank, frame.origin.world_size) == (1, 2)
    assert (frame.step, frame.mode, frame.collection, frame.every) == (
        1200,
        "train",
        "gradients",
        10,
    )
    assert (frame.part, frame.parts, frame.at_us) == (1, 3, 1795258012250123)
    assert frame.rows == ("lm_head.weight", "blocks.0.größe", "empty")
    assert frame.columns == ("min", "max", "mean", "std", "l1", "l2", "absmax")
    np.testing.assert_array_equal(
        frame.values,
        np.array(
            [
                [-1.5, 2.0, 0.25, 0.5, 12.0, 4.0, 2.0],
                [-np.inf, np.inf, np.nan, 1e-45, 3.4028235e38, -0.0, 0.0],
                [0, 0, 0, 0, 0, 0, 0],
            ],
            np.float32,
        ),
    )
    assert frame.count_columns == ("numel", "zeros", "nans", "infs")
    assert frame.counts.tolist() == [[48, 1, 0, 0], [2**63, 2**64 - 1, 12, 3], [0, 0, 0, 0]]


def test_steps() -> None:
    frame = StepFrame.decode(read("steps-v1", ".bin"))

    assert (frame.origin.run_id, frame.origin.rank, frame.mode) == (RUN, 1, "eval")
    assert frame.steps.tolist() == [1199, 1200]
    assert frame.at_us.tolist() == [1795258012150000, 1795258012250123]
    assert frame.columns == ("loss", "lr.0", "log.accuracy")
    np.testing.assert_array_equal(
        frame.values, np.array([[2.75, 0.0003, 0.5], [np.nan, 0.0003, np.inf]], np.float32)
    )


def test_system() -> None:
    frame = SystemFrame.decode(read("system-v1", ".bin"))

    assert (frame.origin.run_id, frame.origin.rank, frame.node) == (RUN, 1, "node-17")
    assert frame.at_us.tolist() == [1795258012250123]
    assert frame.columns == ("cpu.percent", "memory.used_bytes", "gpu.0.utilization_percent")
    np.testing.assert_array_equal(frame.values, [[97.5, 68719476737.0, np.nan]])


def test_snapshot() -> None:
    assert Snapshot.decode(read("snapshot-v1", ".bin")) == Snapshot(
        run_id=RUN,
        incarnation=INCARNATION,
        rule="nonfinite",
        rule_version=3,
        next_offset=48213,
        payload=b'{"seen":\x00\xff}',
        saved_at_ms=1795258012250,
        software="tocsin 0.1.0",
    )


def test_headers() -> None:
    headers = [(name, text.encode()) for name, text in json.loads(read("headers-v1", ".json"))]

    assert read_meta(headers) == Meta(
        type="tensors",
        version=1,
        rank=1,
        boot="3f0e6a2c-2d5e-4c0e-9a57-1f6f0a4b7c11",
        seq=9223372036854775807,
    )


def test_signed_command() -> None:
    datagram = SignedDatagram.model_validate_json(read("signed-command-v1", ".json"))
    keys = TrustedKeys.read([GOLDEN / "signed-command-v1.pub"])
    key, value = datagram.key.encode(), datagram.value.encode()
    signature = Signature(datagram.key_id, datagram.signature)

    keys.verify(key, value, signature)
    event = EVENT_TYPES.decode(value)

    assert isinstance(event.data, StopRequested)
    assert event.data == EVENTS["tocsin.stop.requested-v1"]
    assert event.data.key == datagram.key == f"{RUN}/{INCARNATION}/stop"
    with pytest.raises(SignatureError):
        keys.verify(key, value.replace(b"20.0", b"21.0"), signature)


def test_dead_letter() -> None:
    headers = tuple(
        (name, text.encode()) for name, text in json.loads(read("dead-letter-v1", ".json"))
    )

    assert DeadLetter.read(headers) == DeadLetter(
        topic="tocsin.telemetry.v1",
        partition=17,
        offset=48213,
        error="MalformedRecord",
        message="frame of 3 bytes: shorter than its length field",
        service="rules",
        software="tocsin 0.1.0",
        at_ms=1795258012250,
    )
    assert headers[-1] == ("tocsin-type", b"tensors")
