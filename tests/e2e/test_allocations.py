"""Several launches in one allocation of a scheduler: each is judged and stopped by itself."""

from __future__ import annotations

import sys

from support.site import SCRIPTS, Site


def test_two_launches_in_one_slurm_job(embedded_site: Site) -> None:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    script = str(SCRIPTS / "same_nan.py")
    first, second = (embedded_site.run(sys.executable, script, environ=slurm) for _ in range(2))

    for finished in (first, second):
        assert finished.exit_code == 79, finished
        assert finished.summary["run_id"] == "slurm-4711"
        assert [issue["rule"] for issue in finished.issues] == ["nonfinite"], finished
    assert first.issues[0]["id"] != second.issues[0]["id"]
