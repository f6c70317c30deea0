"""Workers of a Dask scheduler as jobs of SLURM, through dask-jobqueue."""

from __future__ import annotations

import inspect
import shlex
import shutil
import signal
from collections.abc import Mapping
from typing import Any

from sim.errors import TiersimError, near

COMMANDS = ("submit_command", "cancel_command")
DEFAULTS = {"cores": 1, "memory": "2 GB"}
"""The resources of a job by default, where neither the settings nor Dask's configuration give any."""


class Workers:
    """Jobs of SLURM that are workers of a scheduler in this process; use it in a `with` statement.

    settings: keywords of `dask_jobqueue.SLURMCluster` (queue, walltime, cores, processes, memory, python,
        job_script_prologue, …), which override Dask's configuration (`jobqueue.slurm`), and `submit_command` and
        `cancel_command` for sites with other names for sbatch and scancel.

    Raises TiersimError if dask-jobqueue is not installed, a setting or command does not exist, or dask-jobqueue
    refuses a value.
    """

    def __init__(self, count: int, settings: Mapping[str, Any]) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        try:
            import dask
            from dask_jobqueue.core import Job, JobQueueCluster
            from dask_jobqueue.slurm import SLURMCluster, SLURMJob
            from distributed.core import Status
        except ImportError:
            raise TiersimError("dask: value 'slurm': needs dask-jobqueue: pip install 'tiersim[cluster]'") from None
        finally:
            signal.signal(signal.SIGINT, interrupt)  # dask-jobqueue makes of ctrl-C a silent success
        signatures = [inspect.signature(each.__init__).parameters for each in (SLURMJob, Job, JobQueueCluster)]
        known = {name for names in signatures for name in names} - {"self", "scheduler", "args", "kwargs"}
        for key in settings:
            if key not in {*known, *COMMANDS}:
                raise TiersimError(f"slurm: there is no setting {key!r}{near(key, [*known, *COMMANDS])}")
        commands = {key: str(settings.get(key, getattr(SLURMJob, key))) for key in COMMANDS}
        for key, command in commands.items():
            words = shlex.split(command)
            if not words or shutil.which(words[0]) is None:
                raise TiersimError(f"slurm: {key}: value {command!r}: there is no such command on this machine")
        self._refusals: list[str] = []
        refusals = self._refusals

        class SiteJob(SLURMJob):  # type: ignore[misc]
            """A job under this site's commands that remembers their errors."""

            submit_command = commands["submit_command"]
            cancel_command = commands["cancel_command"]

            async def start(self) -> None:
                try:
                    await super().start()
                except RuntimeError as error:
                    refusals.append(" ".join(str(error).rpartition("stderr:")[2].split()))
                    self.status = Status.running  # as if it were queued forever; there is nothing to cancel

        asked: dict[str, Any] = {"scheduler_options": {"dashboard_address": ":0"}}  # beside others on a login node
        asked |= {key: value for key, value in DEFAULTS.items() if dask.config.get(f"jobqueue.slurm.{key}") is None}
        asked |= {key: value for key, value in settings.items() if key not in COMMANDS}
        self.count = count
        try:
            self.cluster = SLURMCluster(job_cls=SiteJob, **asked)
        except (ValueError, TypeError, RuntimeError) as error:
            raise TiersimError(f"slurm: {' '.join(str(error).split())}") from None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    def keep(self, threads: int) -> None:
        """Submit missing jobs: first all, later those that have ended, for instance at their wall time.

        threads: of the connected workers.

        Raises TiersimError if SLURM accepted no job.
        """
        if self._refusals and not threads:
            raise TiersimError(f"slurm: no job was taken: {self._refusals[0]}")
        self.cluster.scale(n=self.count)
