"""A server that answers as the Jobs API of Ray is documented.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.actions.target_jobs import STARTED_MS

TOKEN = "planted-SECRET-token"


def job_details(submission: str, status: str = "RUNNING", **others: Any) -> dict[str, Any]:
    """A job as Ray 2.60 shows it. Its entrypoint, message and environment are the user's words."""
    return {
        "type": "SUBMISSION",
        "job_id": "02000000",
        "submission_id": submission,
        "driver_info": {"id": "02000000", "node_ip_address": "10.0.0.1", "pid": "4711"},
        "status": status,
        "entrypoint": "python train.py --key SECRET",
        "message": "SECRET",
        "error_type": None,
        "start_time": STARTED_MS - 5_000,
        "end_time": None,
        "metadata": {},
        "runtime_env": {"env_vars": {"KEY": "SECRET"}},
        "driver_agent_http_address": "http://10.0.0.1:52365",
        "driver_node_id": "n",
        "driver_exit_code": None,
    } | others


@dataclass
class RayCluster:
    """Its jobs, and what came in. Those in `ends_before_stop` end when they are asked to."""

    jobs: list[dict[str, Any]]
    port: int = 0
    token: str | None = None
    ends_before_stop: bool = False
    seen: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.raw_path}")
        given = request.headers.get("authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            return web.Response(status=401 if given is None else 403, text="SECRET")
        name = request.match_info["name"]
        found = [job for job in self.jobs if name in (job["submission_id"], job["job_id"])]
        if not found:
            return web.Response(status=404, text=f"Job {name} does not exist")
        if request.method == "GET":
            return web.json_response(found[0])
        if found[0]["type"] != "SUBMISSION":
            return web.Response(status=400, text="Can only stop submission type jobs")
        running = found[0]["status"] in ("PENDING", "RUNNING") and not self.ends_before_stop
        found[0]["status"] = "STOPPED" if running else "SUCCEEDED"
        return web.json_response({"stopped": running})


@asynccontextmanager
async def ray_cluster(*jobs: dict[str, Any]) -> AsyncIterator[RayCluster]:
    """Listen on a free port of 127.0.0.1."""
    cluster = RayCluster(list(jobs))
    app = web.Application()
    app.router.add_get("/api/jobs/{name}", cluster.answer)
    app.router.add_post("/api/jobs/{name}/stop", cluster.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        cluster.port = runner.addresses[0][1]
        yield cluster
    finally:
        await runner.cleanup()
