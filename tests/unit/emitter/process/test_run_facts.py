from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.emitter.process import environment, identity, run_facts
from tocsin.schemas.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train.py --lr 0.1", "train.py --lr 0.1"),
        ("train.py --token abc", "train.py --token ***"),
        ("train.py --wandb-api-key=abc --epochs 3", "train.py --wandb-api-key=*** --epochs 3"),
        ("env API_KEY=abc python t.py", "env API_KEY=*** python t.py"),
        ("t.py --hubToken abc", "t.py --hubToken ***"),
        ("t.py --max-tokens 512 --tokenizer bpe", "t.py --max-tokens 512 --tokenizer bpe"),
        ("t.py s3://user:pass@host/x", "t.py s3://***@host/x"),
        ("t.py https://h/x?token=abc&n=1", "t.py 'https://h/x?token=***&n=1'"),
        ("t.py https://h/x?sp=rl&sig=Qm9%3D", "t.py 'https://h/x?sp=rl&sig=***'"),
        ("t.py s3://b/x?X-Amz-Signature=dead", "t.py 's3://b/x?X-Amz-Signature=***'"),
        (
            "t.py https://hooks.slack.com/services/T/B/x",
            "t.py https://hooks.slack.com/services/***",
        ),
        ("t.py https://api.telegram.org/bot1:A/x", "t.py https://api.telegram.org/bot***"),
        ("t.py --signature-column b", "t.py --signature-column b"),
        ("t.py --password --verbose", "t.py --password --verbose"),
        ("t.py hf_abcdefghijklmnopqrst", "t.py ***"),
        ("t.py model.auth.secret=x", "t.py model.auth.secret=***"),
    ],
)
def test_secrets_are_masked(given: str, expected: str) -> None:
    assert run_facts.command_line(given.split()) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("export WANDB_API_KEY=0123; python t.py", "export WANDB_API_KEY=***; python t.py"),
        ("python t.py --api-key hunter2 --lr 1", "python t.py --api-key *** --lr 1"),
        ("python t.py --password -hunter2-", "python t.py --password ***"),
        ("cd x && DB_PASSWORD='a b' python t.py", "cd x && DB_PASSWORD='***' python t.py"),
        ('{"api_key": "hunter2", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        ("python t.py --token $TOKEN --max-tokens 5", "python t.py --token $TOKEN --max-tokens 5"),
        ("python t.py --password --verbose", "python t.py --password --verbose"),
        ("postgres://u:pa/ss@host/db", "postgres://***@host/db"),
        ("postgres://u:p@ss/w@host/db", "postgres://***@host/db"),
        ("git+https://github.com/x/y@main", "git+https://github.com/x/y@main"),
    ],
)
def test_secrets_inside_of_a_script_are_masked(given: str, expected: str) -> None:
    assert run_facts.mask_text(given) == expected
    (found,) = run_facts.mask_arguments([given])
    assert found == expected


def test_a_secret_may_begin_like_an_option() -> None:
    assert run_facts.mask_arguments(["--password", "-hunter2-", "x"]) == ["--password", "***", "x"]


def test_git_commit_of_a_folder_inside(tmp_path: Path) -> None:
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git" / "packed-refs").write_text("# x\n" + "a" * 40 + " refs/heads/main\n")
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    assert run_facts.git_commit(inside) == "a" * 40
    (tmp_path / ".git" / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert run_facts.git_commit(inside) == "b" * 40
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert run_facts.git_commit(inside) is None


@pytest.mark.parametrize(
    ("told", "expected"),
    [("1795257600", 1795257600000), ("", None), ("NONE", None), ("99999999999999", None)],
)
def test_the_time_limit_of_slurm(told: str, expected: int | None) -> None:
    assert run_facts.ends_by_ms({"SLURM_JOB_END_TIME": told}) == expected
    assert run_facts.ends_by_ms({}) is None


def test_run_ids_by_precedence() -> None:
    slurm = {"SLURM_JOB_ID": "7", "TOCSIN_RUN_ID": "set"}
    assert identity.resolve_run_id("asked", slurm) == "asked"
    assert identity.resolve_run_id(None, slurm) == "set"
    assert identity.resolve_run_id(None, {"SLURM_JOB_ID": "7"}) == "slurm-7"
    assert identity.resolve_run_id(None, {"TORCHELASTIC_RUN_ID": "e1"}) == "torchelastic-e1"
    fresh = identity.resolve_run_id(None, {"TORCHELASTIC_RUN_ID": "none"})
    assert fresh.startswith("run-")
    with pytest.raises(ConfigurationError):
        identity.resolve_run_id("a b", {})


def test_incarnations_differ_by_training_and_restart(tmp_path: Path) -> None:
    environ = {"TOCSIN_RUN_ID": "r", "TOCSIN_JOB_ID": "j", "TOCSIN_RUNTIME_DIR": str(tmp_path)}
    one = identity.identify(environ, rank=0, local_rank=0, world_size=2)
    other_rank = identity.identify(environ, rank=1, local_rank=1, world_size=2)
    again = identity.identify(environ, rank=0, local_rank=0, world_size=2)
    restarted = identity.identify(
        {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}, rank=0, local_rank=0, world_size=2
    )
    assert one.incarnation == other_rank.incarnation
    assert (one.training, again.training, restarted.training) == (0, 1, 0)
    assert len({one.incarnation, again.incarnation, restarted.incarnation}) == 3


def test_each_restart_by_torchelastic_in_each_life_under_slurm_is_another() -> None:
    def count(slurm: int | None, elastic: int | None) -> int:
        environ = {"SLURM_RESTART_COUNT": slurm, "TORCHELASTIC_RESTART_COUNT": elastic}
        return identity.restart_count({k: str(v) for k, v in environ.items() if v is not None})

    lives = [count(slurm, elastic) for slurm in (None, 1, 2) for elastic in (0, 1, 5)]
    assert lives == sorted(set(lives))
    assert [count(1, None), count(None, None)] == [count(1, 0), 0]  # launcher and first ranks agree


def test_rank_from_the_environment() -> None:
    assert identity.rank_of({}) == (0, 0, 1)
    assert identity.rank_of({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == (3, 1, 4)
    assert identity.rank_of({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}) == (2, 0, 8)


def test_labels_of_the_environment() -> None:
    assert environment.parse_labels("a=1, b=2,c") == {"a": "1", "b": "2"}


def test_labels_reach_the_job_as_they_are() -> None:
    labels = {"team": "vision", "note": "lr=1, wd=2", "why": "a, team=nlp", "space": " x "}
    handed_down = environment.labels_for_job(labels)
    assert environment.labels_of_job(handed_down) == labels
    # Also for a `tocsin run` in the job, which refuses what is not k=v.
    assert handed_down["TOCSIN_LABELS"] == "team=vision"
    changed = handed_down | {"TOCSIN_LABELS": "team=nlp"}
    assert environment.labels_of_job(changed) == labels | {"team": "nlp"}
    assert environment.labels_of_job({"TOCSIN_LABELS": "a=b"}) == {"a": "b"}
    assert environment.labels_of_job({"TOCSIN_LABELS_JSON": "x"}) == {}
