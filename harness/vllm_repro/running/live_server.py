"""A vLLM server for a program or a test, under the same watch as the trials of a run.

The body of the `with` statement replaces the workload. Boot, watch, lease, guard and diagnosis are
those of `run_trial`, which runs in a thread with its own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError, InfraError, ReproError, Unsupported, UsageError
from vllm_repro.host.lease import TEMPORARY
from vllm_repro.host.machine import gpus
from vllm_repro.journal.journal import Journal
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.local_vllm import local_vllm
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import parse_source
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.job import choice_of, first_line, refuse_unused_options
from vllm_repro.running.state import TimeLimits, Trial
from vllm_repro.running.trial import run_trial
from vllm_repro.running.workload import WorkloadRunner
from vllm_repro.scenario.scenario import Arm, Edit, Model, Needs, Scenario, Status
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.orphans import sweep
from vllm_repro.servers.site import open_site
from vllm_repro.trigger.trigger import Condition, TriggerResult
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_diagnosis.evidence import Evidence, banner

if TYPE_CHECKING:
    from openai import OpenAI

_LOG = logging.getLogger("vllm_repro")
_FRAMES = 12
"""Innermost frames in the message of `EngineDied`."""
_LOOK = 0.2
"""Seconds between two looks for a signal."""

VllmServerFactory = Callable[..., "VllmServer"]
"""Type of the pytest fixture `vllm_server`, which takes the arguments of `VllmServer`."""

RUNNING: list[VllmServer] = []
"""The servers of this process that are entered and not closed."""


class EngineDied(Exception):
    """The engine died, hung, or returns no more tokens.

    exception: class name of the root exception; None if no log names one, as after SIGKILL.
    message: its text, or another description of the death; without the secrets of the environment.
    frames: `file:function`, the innermost last. log: the server's log.
    """

    __module__ = "vllm_repro"  # where a program imports it from

    def __init__(self, conclusion: Conclusion, log: Path, *, banner: str = "") -> None:
        shown = Redactor(secrets=known_secrets(os.environ), names=False).text
        death = conclusion.death
        self.exception = death.exception if death is not None else None
        self.message = shown((death and death.exception and death.message) or conclusion.why)
        self.frames = death.frames if death is not None else ()
        self.log = log
        first = f"{self.exception}: {self.message}" if self.exception else self.message
        frames = [f"  {frame}" for frame in self.frames[-_FRAMES:]]
        super().__init__("\n".join(filter(None, (first, *frames, banner, f"log: {log}"))))


class VllmServer:
    """A vLLM server for one `with` statement: `with VllmServer("vllm serve …") as server:`.

    Entering raises `EngineDied` if the engine dies in its boot, `Unsupported` or `InfraError` if
    the server cannot run here, and `UsageError` or `CommandError` for wrong arguments. Leaving ends
    the server and raises `EngineDied` if the engine died meanwhile, also in place of an exception
    of the body, which is then its cause.
    """

    def __init__(
        self,
        # as for a shell, `vllm serve …` or `docker run …`; host and port are replaced
        command: str,
        *,
        # "auto": the first of docker and process that can run the command
        server: Literal["auto", "docker", "process", "rehearsal"] = "auto",
        # release, wheel, folder or commit; None: the vllm on PATH, else the newest cached release
        vllm: str | None = None,
        image: str | None = None,
        # folder or name in place of the command's
        model: str | None = None,
        # "dummy" serves a tiny model of random weights in its place
        weights: Literal["real", "dummy"] = "real",
        # variables of the server, in addition to those of the command
        env: Mapping[str, str] | None = None,
        # for log and journal; None: a temporary one, removed if the engine lived
        folder: str | os.PathLike[str] | None = None,
        # seconds without any progress
        boot_stall: float = TimeLimits.boot_stall,
        answer_stall: float = TimeLimits.answer_stall,
    ) -> None:
        self._command = command
        source = parse_source(vllm) if vllm else None
        self._options = ServerOptions(
            server=server, vllm=source, image=image, model=model, weights=weights
        )
        self._env = dict(env or {})
        self._named_folder = folder
        self._limits = TimeLimits(boot_stall=boot_stall, answer_stall=answer_stall)
        self._returned = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._up = threading.Event()  # ready, or failed
        self._opened = contextlib.ExitStack()
        self._runner: WorkloadRunner | None = None
        self._conclusion: Conclusion | None = None
        self._error: BaseException | None = None
        self._failed: Exception | None = None

    def __enter__(self) -> Self:
        for line in sweep():
            _LOG.info("left by a killed run, removed: %s", line)
        with contextlib.ExitStack() as opened:
            try:
                self._trial = self._make_trial(opened)
            except ReproError as error:
                raise error.with_traceback(None) from None  # else its lines would hide the message
            self._opened = opened.pop_all()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vllm-repro server", daemon=True)
        self._thread.start()
        RUNNING.append(self)
        try:
            # a wait without timeout ignores a signal that another thread gets
            while not self._up.wait(_LOOK):
                pass
        except BaseException:
            self._end()
            raise
        if self._runner is None:
            self.close()
            raise InfraError("the server ended before it was ready")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except (EngineDied, ReproError) as found:
            if isinstance(error, Exception):
                raise found from error
            if error is None:  # else the interrupt propagates
                raise

    @property
    def base_url(self) -> str:
        """URL of the server, without `/v1`."""
        return self._trial.server.base_url

    @property
    def model(self) -> str:
        """Name of the served model; empty if the server never became ready."""
        return self._runner.model if self._runner else ""

    @property
    def log(self) -> Path:
        """The server's log, which grows while it runs."""
        return self._trial.log

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the server's processes, the API server first; empty if they cannot be seen."""
        return self._trial.server.processes()

    @property
    def evidence(self) -> Evidence:
        """Kind of evidence: a GPU, a CPU, or a rehearsal."""
        return self._trial.launch.evidence

    def client(self, **options: Any) -> OpenAI:
        """Return an `openai.OpenAI` for this server, closed when it ends.

        It ignores proxies of the environment. options: further arguments, such as `max_retries`.
        """
        import openai  # here: a second of imports

        key = self._trial.api_key or "EMPTY"
        http = openai.DefaultHttpxClient(trust_env=False)  # no proxy of the environment
        client = openai.OpenAI(
            **{"base_url": f"{self.base_url}/v1", "api_key": key, "http_client": http, **options}
        )
        self._opened.callback(client.close)
        return client

    def assert_alive(self) -> None:
        """Ask the engine for one token, then wait up to a second for a later crash.

        If it is dead or hung, end the server and raise `EngineDied`.

        If it has ended the server before, raise the same error again. Raises `UsageError` if the
        server was closed.
        """
        if self._failed is not None:
            raise self._failed
        if self._thread is None or self._runner is None:
            raise UsageError("the server is closed, so it cannot be asked")
        asyncio.run_coroutine_threadsafe(self._check(self._runner), self._loop).result()
        over = self._conclusion or self._error or self._runner.watch.ended
        if over or self._trial.seen.canary_ok is False:  # None: this server rejects such a request
            self.close()

    def close(self) -> None:
        """End the server and wait until it is gone.

        Raises `EngineDied` if the engine died, `Unsupported` or `InfraError` if the server could
        not run, unless that was raised before. May be called again.
        """
        self._end()
        conclusion, self._conclusion = self._conclusion, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        if conclusion is not None and (failure := self._failure(conclusion)) is not None:
            self._failed = failure
            raise failure

    def _end(self) -> None:
        """End the server, wait for its thread, and give back lease and folder; raise no outcome.

        Do nothing if it is closed.
        """
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._returned.set)
            self._thread.join()
            self._thread = None
            RUNNING.remove(self)
            self._opened.close()

    def _failure(self, conclusion: Conclusion) -> Exception | None:
        """Return the exception for a trial's outcome; None if the engine lived or was cancelled."""
        outcome = conclusion.outcome
        if outcome.facts.alive or outcome is Outcome.CANCELLED:
            return None
        if outcome in (Outcome.UNSUPPORTED, Outcome.INFRA):
            return (Unsupported if outcome is Outcome.UNSUPPORTED else InfraError)(conclusion.why)
        return EngineDied(
            conclusion,
            self.log,
            banner=banner(self.evidence, conclusion.version, self._trial.launch.compiled),
        )

    def _make_trial(self, opened: contextlib.ExitStack) -> Trial:
        """Choose and lease a server, make the log's folder, and return the trial to run.

        opened: holds the lease, the journals and the temporary folder until it is closed. Raises
        `Unsupported`, `InfraError`, `UsageError` or `CommandError`.
        """
        options, installed = self._options, ReleaseCache().cached()
        on_gpu = bool(gpus()) and options.server != "rehearsal"
        if options.server in ("auto", "process") and not (
            options.vllm or options.image or on_gpu or local_vllm()
        ):
            if not installed:
                raise Unsupported(
                    "no vLLM is installed here",
                    hint=f'vllm="{NEWEST}" installs that release into a cache',
                )
            options = replace(options, vllm=installed[-1].source)
        version = f"{options.vllm or NEWEST}"
        scenario = _scenario(self._command, self._env, version, on_gpu=on_gpu)
        choice = choice_of(scenario, options)
        if options.server == "auto" and choice.kind is ServerKind.REHEARSAL:
            raise Unsupported(
                f"no vLLM can run here: {choice.why}", hint='server="rehearsal" imitates one'
            )
        refuse_unused_options(options, choice.kind)
        site = open_site(scenario, options, choice, _LOG.info)
        _LOG.info(first_line(site, choice.why, f"{options.vllm or ''}"))
        opened.enter_context(site.leased(scenario, options, _LOG.info))
        if self._named_folder is None:
            folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
            opened.callback(self._remove_if_alive, folder)
        else:
            folder = Path(self._named_folder).absolute()
        log = folder / "logs" / "server-1.log"
        if log.exists():
            raise UsageError(
                f"{folder} holds the log of another server",
                hint="name a new folder for each server",
            )
        log.parent.mkdir(parents=True, exist_ok=True)
        redactor = Redactor(secrets=known_secrets({**os.environ, **self._env}), names=False)
        launch, server = site.server(scenario, scenario.arms[0], 1, log, folder.name)
        return Trial(
            scenario=scenario,
            arm=scenario.arms[0],
            number=1,
            launch=launch,
            server=server,
            gpus=site.gpus,
            log=log,
            limits=self._limits,
            seed=1,
            journal=opened.enter_context(Journal(folder / "journal.jsonl", redactor)),
            requests=opened.enter_context(Journal(folder / "requests.jsonl", redactor)),
            notify=_LOG.debug,
            api_key=os.environ.get("VLLM_API_KEY"),
        )

    def _remove_if_alive(self, folder: Path) -> None:
        """Remove the temporary folder, unless the engine or the harness failed."""
        ended = None if self._conclusion is None else self._conclusion.outcome
        if self._error is None and (
            ended is None or ended.facts.alive or ended is Outcome.CANCELLED
        ):
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self) -> None:
        """Run the trial in this thread, with an event loop of its own."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run_trial())

    async def _run_trial(self) -> None:
        """Run the trial and set `_conclusion` or `_error`; set `_up` when it has ended.

        The loop runs on until the server is closed, for `assert_alive`.
        """
        trial = asyncio.ensure_future(run_trial(self._trial, self._lend))
        returned = asyncio.ensure_future(self._returned.wait())
        await asyncio.wait((trial, returned), return_when=asyncio.FIRST_COMPLETED)
        if self._runner is None:
            trial.cancel()  # closed during the boot; no effect on a boot that has failed
        await asyncio.wait((trial,))
        if not trial.cancelled():
            self._error = trial.exception()
            self._conclusion = trial.result() if self._error is None else None
        self._up.set()
        await returned

    async def _lend(self, runner: WorkloadRunner) -> None:
        """Stand in for the workload: wait until the server is closed, or dies or hangs.

        Set `_runner` and `_up`, so that entering returns. At the end ask for one token.
        """

        async def returned() -> None:
            await self._returned.wait()

        if await runner.find_model():
            self._runner = runner
            self._up.set()
            await runner.unless_over([asyncio.create_task(returned())])
            await self._check(runner)

    async def _check(self, runner: WorkloadRunner) -> None:
        """Ask the engine for one token, unless it is known to be dead or hung."""
        if not runner.watch.ended:
            # the trial has just ended, and closed its client
            with contextlib.suppress(RuntimeError):
                await runner.finish()


def _scenario(command: str, env: Mapping[str, str], version: str, *, on_gpu: bool) -> Scenario:
    """Return a scenario that holds only this command and environment, for `VllmServer`.

    Its model is the tiny one of `weights="dummy"`. version: the release. on_gpu: it needs the GPUs
    of the command.
    """
    parsed = parse(command)
    if not parsed.model:
        raise CommandError("the command names no model", hint="vllm serve MODEL …")
    variables = Edit(
        " ".join(["with", *env]),
        lambda command: replace(command, env=(*command.env, *env.items())),
    )
    ranks = [
        parsed.number(flag) or 1 for flag in ("--tensor-parallel-size", "--pipeline-parallel-size")
    ]
    return Scenario(
        id="server",
        issue="",
        title="",
        command=command,
        model=Model(
            parsed.model,
            heads=16,
            kv_heads=8,
            head_dim=128,
            layers=2,
            vocab_size=4096,
            max_position=40960,
            tiny_will_do=True,
        ),
        needs=Needs(gpus=ranks[0] * ranks[1] if on_gpu else 0),
        status=Status(bad=""),
        try_with=version,
        workload=(),
        trigger=Condition("nothing", lambda _: TriggerResult(True, ())),
        arms=(Arm("server", Expected.LIVES, (variables,)),),
    )
