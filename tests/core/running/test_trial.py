from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_package import fake_release
from tests.fake_vllm import (
    COMPLETES,
    COMPLETION,
    METRICS,
    OPENAPI,
    Exchange,
    FakeVllm,
    Handler,
    answering,
    keeping,
    never_ending,
)
from tests.report_examples import REHEARSAL
from vllm_repro.client.answer import DEAD_MESSAGE
from vllm_repro.errors import InfraError
from vllm_repro.journal.journal import Entry, Journal, read
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.running import trial as trial_module
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.state import TimeLimits, Trial
from vllm_repro.running.trial import run_trial
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm
from vllm_repro.scenario.vocabulary import patched
from vllm_repro.scenario.workload import chat, completion, conversation, request, sized, together
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.process import ProcessServer
from vllm_repro.trigger.conditions import answered, left_waiting
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = pytest.mark.usefixtures("short_waits")

SCENARIO = find("min-tokens-stop-ids")
FATAL = (
    "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a fatal"
    " error.\n(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] Traceback (most recent call"
    " last):\n(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138]   File"
    ' "/v/vllm/v1/engine/core.py", line 1, in run_busy_loop\n(EngineCore pid=9) ERROR 11-20'
    " 08:24:30 [core.py:1138] ValueError: something else"
)


ARM = SCENARIO.arms[0]
OUTLAST = trial_module._OUTLAST  # without `short_waits`
LAUNCH = Launch(kind=ServerKind.PROCESS, evidence=Evidence.CPU, command=SCENARIO.command_of(ARM))


def trial_on(fake: FakeVllm, folder: Path) -> Trial:
    return Trial(
        scenario=SCENARIO,
        arm=ARM,
        number=1,
        launch=LAUNCH,
        server=fake,
        log=fake.log_path,
        limits=TimeLimits(boot_stall=5.0, answer_stall=5.0, grace=1.0),
        seed=1,
        journal=Journal(folder / "journal.jsonl"),
        requests=Journal(folder / "requests.jsonl"),
        notify=lambda _: None,
    )


def tried(folder: Path, paths: Mapping[str, Handler], **changes: Any) -> tuple[Conclusion, Trial]:
    """Run a trial, with `changes` of its fields, on a fake server with these `paths`."""
    with FakeVllm(folder / "log", paths) as fake:
        trial = replace(trial_on(fake, folder), **changes)
        with trial.journal, trial.requests:
            return asyncio.run(run_trial(trial)), trial


def concluded(folder: Path, paths: Mapping[str, Handler], **changes: Any) -> Conclusion:
    return tried(folder, paths, **changes)[0]


@pytest.fixture
def sdk(
    monkeypatch: pytest.MonkeyPatch,
    short_waits: None,  # noqa: ARG001  # the fixture whose limit it replaces
) -> None:
    """Ask a dead engine as a program with the SDK does, with short pauses between the attempts."""
    monkeypatch.setattr(trial_module, "_SDK_TOTAL", 60.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def is_the_odd_one(exchange: Exchange) -> bool:
    return "stop_token_ids" in exchange.body


def odd(answer: Handler) -> dict[str, Handler]:
    """Return the paths of a server that gives `answer` to the request that crosses the boundary."""

    def completions(exchange: Exchange) -> None:
        (answer if is_the_odd_one(exchange) else COMPLETES)(exchange)

    return {"/v1/completions": completions}


def fatal_line(exchange: Exchange) -> None:
    """Write a fatal line and reset the request."""
    exchange.fake.write(FATAL)
    exchange.reset()


def test_a_death_at_readiness_is_not_infra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.running.workload._SIGN_AFTER_FAILURE", 60.0)  # the sign ends it
    gone: list[bool] = []

    def models(exchange: Exchange) -> None:
        gone.append(True)
        exchange.reset()

    def health(exchange: Exchange) -> None:
        exchange.reset() if gone else exchange.answer(200)

    conclusion = concluded(tmp_path, {"/v1/models": models, "/health": health})
    assert (conclusion.outcome, bool(conclusion.death)) == (Outcome.OTHER_CRASH, True)


def test_a_death_on_a_full_disk_is_trouble_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda **_: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    )
    conclusion = concluded(tmp_path, {"/v1/completions": fatal_line})
    assert conclusion.outcome is Outcome.INFRA
    assert "No space left on device" in conclusion.why


@pytest.mark.parametrize("sign", ["write", "die"], ids=["a fatal line alone", "a death"])
@pytest.mark.parametrize("delay", [0.15, 0.6])
def test_a_death_that_the_last_answer_hides_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float, sign: str
) -> None:
    # A death ends the look. After a line alone it goes on to its end.
    look = 60.0 if sign == "die" else 2.0
    monkeypatch.setattr("vllm_repro.running.watch._LAST_LOOK_AT_VLLM", look)

    def completions(exchange: Exchange) -> None:
        exchange.answer(200, COMPLETION)
        if exchange.body["max_tokens"] == 1:  # the canary
            threading.Timer(delay, getattr(exchange.fake, sign), (FATAL,)).start()

    conclusion = concluded(tmp_path, {"/v1/completions": completions})
    assert conclusion.outcome is Outcome.OTHER_CRASH
    assert conclusion.death
    assert conclusion.death.exception == "ValueError"


def test_a_request_without_any_answer_is_not_clean(tmp_path: Path) -> None:
    # The first request that crosses is answered; an ordinary one before it is cut off, and the
    # server goes on.
    answers = itertools.chain([Exchange.reset], itertools.repeat(COMPLETES))
    conclusion = concluded(tmp_path, {"/v1/completions": lambda exchange: next(answers)(exchange)})
    assert (conclusion.trigger.crossed, conclusion.outcome) == (True, Outcome.WRONG_OUTPUT)
    assert "no answer" in conclusion.why


def test_fields_are_asked_once_per_release_and_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    paths = {"/openapi.json": keeping(asked, answering(200, OPENAPI))}
    monkeypatch.setattr(ReleaseCache, "check", lambda *_: None)
    launch = replace(LAUNCH, release=fake_release("0.28.0", tmp_path))
    patch = patched("vllm/x.py", was="a", now="b", why="any")
    for arm, times in ((ARM, 1), (ARM, 1), (replace(ARM, patches=(patch,)), 2)):
        conclusion = concluded(tmp_path, paths, arm=arm, launch=launch)
        assert (conclusion.outcome, len(asked)) == (Outcome.CLEAN, times)


def test_a_release_whose_files_changed_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: object) -> None:
        raise InfraError("files of vLLM 0.28.0 were changed", hint="Repeat the command.")

    monkeypatch.setattr(ReleaseCache, "check", changed)
    release = fake_release("0.28.0", tmp_path)
    conclusion = concluded(tmp_path, {}, launch=replace(LAUNCH, release=release))
    assert (conclusion.outcome, conclusion.why) == (
        Outcome.INFRA,
        "files of vLLM 0.28.0 were changed (Repeat the command.)",
    )


@pytest.mark.parametrize(
    ("path", "outcome"), [("/metrics", Outcome.CLEAN), ("/v1/models", Outcome.INFRA)]
)
def test_an_answer_that_never_stops_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, outcome: Outcome
) -> None:
    monkeypatch.setattr("vllm_repro.client.client.MOST_BYTES", 4 << 20)
    conclusion = concluded(tmp_path, {path: never_ending})
    assert conclusion.outcome is outcome
    assert outcome is Outcome.CLEAN or "larger than 4 MiB" in conclusion.why


def test_another_server_on_the_port_is_infra(tmp_path: Path) -> None:
    with FakeVllm(tmp_path / "strangers.log", {}) as fake:
        ours = ProcessServer(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            port=0,
            log=tmp_path / "log",
            env={},
            kind=ServerKind.PROCESS,
            evidence=Evidence.CPU,
            grace=1,
        )
        ours.base_url, ours.port = fake.base_url, int(fake.base_url.rsplit(":", 1)[1])
        trial = replace(trial_on(fake, tmp_path), server=ours, log=tmp_path / "log")
        with trial.journal, trial.requests, pytest.MonkeyPatch.context() as patch:
            # The port was free when it was looked at.
            patch.setattr("vllm_repro.servers.process.check_port", lambda _: None)
            conclusion = asyncio.run(run_trial(trial))
    assert conclusion.outcome is Outcome.INFRA
    assert "another server listens" in conclusion.why


@pytest.mark.parametrize("moment", ["stop", "assess"])
def test_an_interrupt_after_the_last_answer_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    begun, cancelled = threading.Event(), threading.Event()
    real = run_trial.__globals__["assess"]

    def slow(*words: object) -> object:
        if moment == "assess":
            begun.set()
            assert cancelled.wait(60)
        return real(*words)

    monkeypatch.setitem(run_trial.__globals__, "assess", slow)

    class Slow(FakeVllm):
        async def stop(self) -> None:
            if moment == "stop":
                begun.set()
                assert await asyncio.to_thread(cancelled.wait, 60)
            self.stops += 1

    async def interrupted(trial: Trial) -> None:
        running = asyncio.create_task(run_trial(trial))
        while not begun.is_set():
            await asyncio.sleep(0.02)
        assert '"canary"' in trial.journal.path.read_text(encoding="utf-8"), (
            "the last answer was there"
        )
        running.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    with Slow(tmp_path / "log", {}) as fake:
        trial = trial_on(fake, tmp_path)
        with trial.journal, trial.requests:
            asyncio.run(interrupted(trial))
        assert fake.stops == 1
    (ended,) = journaled(tmp_path, "trial-ended")
    counted = '{"sent": 2, "ok": 2, "failed": 0}'
    assert (ended["outcome"], json.dumps(ended["requests"])) == ("clean", counted)


@pytest.mark.parametrize("given", ["nothing", "a reset"])
def test_an_unanswered_request_reached_the_engine_that_died(tmp_path: Path, given: str) -> None:
    def dies(exchange: Exchange) -> None:
        exchange.fake.die(FATAL)
        exchange.reset() if given == "a reset" else exchange.stall()

    conclusion = concluded(tmp_path, odd(dies))
    assert (conclusion.trigger.crossed, conclusion.outcome) == (True, Outcome.OTHER_CRASH)
    assert "the engine died with it in flight" in conclusion.trigger.evidence[0]


def test_the_server_of_another_node_that_stays_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [tmp_path / f"log.rank{rank}.log" for rank in (1, 2)]
    for log in ranks:
        log.write_text("up\n", encoding="utf-8")

    async def surviving_ranks(_: FakeVllm, seconds: float) -> tuple[int, ...]:
        assert seconds > 3.0  # of a worker that died the server ends within so many
        with ranks[1].open("a", encoding="utf-8") as log:
            log.write("a last word\n")
        return (1, 2)

    monkeypatch.setattr(trial_module, "_OUTLAST", OUTLAST)
    monkeypatch.setattr(FakeVllm, "surviving_ranks", surviving_ranks)
    monkeypatch.setattr(FakeVllm, "rank_logs", property(lambda _: tuple(ranks)))
    conclusion = concluded(tmp_path, {"/v1/completions": dead_engine})
    assert [(one.rank, one.silent) for one in conclusion.outlasted] == [(1, True), (2, False)]
    (ended,) = journaled(tmp_path, "trial-ended")
    assert ended["rank_logs"] == ["logs/log.rank1.log", "logs/log.rank2.log"]
    assert [rank["rank"] for rank in ended["outlasted"]] == [1, 2]


def journaled(folder: Path, event: str) -> list[Entry]:
    """Return the journal's entries of an event."""
    return list(read(folder / "journal.jsonl").of(event))


def end_engine(fake: FakeVllm) -> None:
    """Write a fatal line, and let the server end."""
    fake.write(FATAL)
    fake.paths["/health"] = answering(503)
    fake.ended.set()


def dead_engine(exchange: Exchange) -> None:
    end_engine(exchange.fake)
    exchange.reset()


@pytest.mark.usefixtures("sdk")
def test_a_program_with_the_sdk_retries_the_request_that_killed(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    def dies(exchange: Exchange) -> None:
        if len(bodies) > 2:
            return dead_engine(exchange)
        exchange.fake.write(FATAL)
        return exchange.answer(500, {"error": {"message": DEAD_MESSAGE}})

    paths = {"/v1/completions": keeping(bodies, odd(dies)["/v1/completions"])}
    conclusion = concluded(tmp_path, paths)
    (saw,) = journaled(tmp_path, "client-saw")
    assert (saw["arm"], saw["trial"], saw["error"]) == (ARM.name, 1, "APIConnectionError")
    assert (saw["retries"], saw["attempts"], bodies[1:]) == (2, [500, None, None], [bodies[1]] * 3)
    assert conclusion.outcome is Outcome.OTHER_CRASH
    assert conclusion.sent == 2, "the retries do not count as requests of the workload"


@pytest.mark.usefixtures("sdk")
def test_a_program_asks_a_dead_engine_that_no_request_failed_on(tmp_path: Path) -> None:
    bodies: list[Mapping[str, Any]] = []

    def completions(exchange: Exchange) -> None:
        bodies.append(exchange.body)
        # cut off, and the canary then gets a token: this request is not the one that killed
        if len(bodies) == 1:
            exchange.reset()
            return
        exchange.answer(200, COMPLETION)
        if is_the_odd_one(exchange):
            end_engine(exchange.fake)

    concluded(tmp_path, {"/v1/completions": completions})
    (saw,) = journaled(tmp_path, "client-saw")
    assert (saw["error"], saw["attempts"], bodies[-1]["prompt"]) == (None, [], "Hello")


def test_a_client_waits_a_bounded_time_for_a_dead_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "_SDK_TOTAL", 0.2)

    def completions(exchange: Exchange) -> None:
        exchange.fake.paths["/v1/completions"] = Exchange.stall
        dead_engine(exchange)

    began = time.monotonic()
    conclusion = concluded(tmp_path, {"/v1/completions": completions})
    assert time.monotonic() - began < 50.0, "the server stalls for 60 s"
    saw = journaled(tmp_path, "client-saw")
    assert (conclusion.outcome, saw) == (Outcome.OTHER_CRASH, [])


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize("died", [False, True])
def test_no_client_asks_a_server_that_lives_or_is_not_ours(tmp_path: Path, died: bool) -> None:
    def completions(exchange: Exchange) -> None:
        exchange.answer(200, COMPLETION)
        if died:
            exchange.fake.write(FATAL)

    launch = replace(LAUNCH, kind=ServerKind.ATTACH) if died else LAUNCH
    conclusion = concluded(tmp_path, {"/v1/completions": completions}, launch=launch)
    assert conclusion.outcome is (Outcome.OTHER_CRASH if died else Outcome.CLEAN)
    assert journaled(tmp_path, "client-saw") == []


WITHOUT_THE_FIELD = json.dumps(OPENAPI).replace("stop_token_ids", "stop_tokens")
UNKNOWN_TOKEN = "stop_token_ids contain out-of-vocab token ids"


def refused(status: int, message: str = "no") -> Handler:
    return answering(status, {"error": {"message": message, "code": status}})


def rehearses(exchange: Exchange) -> None:
    """Answer `/version` as a rehearsal engine in an image without the label."""
    exchange.send_response(200)
    exchange.send_header("x-vllm-rehearsal", "1")
    exchange.send_header("Content-Length", "21")
    exchange.end_headers()
    exchange.wfile.write(b'{"version": "0.28.0"}')


def logs(device: str) -> dict[str, Handler]:
    """Return the paths of a server whose log shows the device."""
    core = (
        "(EngineCore pid=2) INFO 11-20 08:24:10 [core.py:1] Initializing a V1 LLM engine (v0.28.0)"
        f" with config: device_config={device}"
    )

    def health(exchange: Exchange) -> None:
        if not exchange.fake.log_path.read_text(encoding="utf-8"):
            exchange.fake.write(core)
        exchange.answer(200)

    return {"/health": health}


def may_fail(*statuses: int) -> dict[str, Arm]:
    request = completion(prompt="hello", min_tokens=1, stop_token_ids=[9], may_fail=statuses)
    return {"arm": replace(ARM, workload=(request,))}


@pytest.mark.parametrize(
    ("paths", "changes", "outcome", "why"),
    [
        ({}, {}, Outcome.CLEAN, ""),
        # Only a refusal of the request itself is an answer to it.
        (odd(refused(400, UNKNOWN_TOKEN)), {}, Outcome.CLEAN, ""),
        (odd(refused(422, UNKNOWN_TOKEN)), {}, Outcome.CLEAN, ""),
        (odd(refused(400, "maximum context length is 8")), {}, Outcome.UNTRIGGERED, ""),
        (odd(refused(401, UNKNOWN_TOKEN)), {}, Outcome.UNTRIGGERED, ""),
        (odd(refused(404, "no such model")), {}, Outcome.UNTRIGGERED, ""),
        (odd(refused(429, "too many requests")), {}, Outcome.UNTRIGGERED, ""),
        # A field that the release does not know is no evidence.
        *(
            ({"/openapi.json": answer}, {}, Outcome.UNTRIGGERED, "stop_token_ids=[999999]")
            for answer in (answering(200, WITHOUT_THE_FIELD), answering(404), Exchange.reset)
        ),
        (odd(refused(500)), may_fail(), Outcome.WRONG_OUTPUT, ""),
        (odd(refused(500)), may_fail(500), Outcome.CLEAN, ""),
        *(
            (odd(answering(200, body)), {}, Outcome.WRONG_OUTPUT, "")
            for body in (
                *("null", "[]", '{"choices": [null]}'),
                *('{"choices": [{}], "usage": 1}', "\x00"),
            )
        ),
        # The canary is refused.
        *(
            (dict.fromkeys(("/v1/completions", "/pooling"), refused(status)), {}, outcome, "")
            for status, outcome in ((404, Outcome.UNTRIGGERED), (500, Outcome.WRONG_OUTPUT))
        ),
        # A server that is another than was ordered is no evidence.
        ({"/version": rehearses}, {}, Outcome.INFRA, "rehearsal engine, not vLLM"),
        (logs("cuda"), {}, Outcome.INFRA, "log shows gpu"),
        (logs("cpu"), {}, Outcome.CLEAN, ""),
        (logs("unknown"), {}, Outcome.CLEAN, ""),
    ],
)
def test_what_a_server_answers_has_its_outcome(
    tmp_path: Path,
    paths: Mapping[str, Handler],
    changes: dict[str, Any],
    outcome: Outcome,
    why: str,
) -> None:
    conclusion = concluded(tmp_path, paths, **changes)
    assert (conclusion.outcome, conclusion.outlasted) == (outcome, ()), conclusion.why
    assert conclusion.trigger.crossed or outcome is not Outcome.CLEAN
    assert why in f"{conclusion.why} {conclusion.trigger.evidence}"


def test_our_own_imports_are_no_part_of_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.running.trial._while_booting", lambda _: time.sleep(1))
    assert 0 < (concluded(tmp_path, {}).boot_s or 0) < 1


def test_the_report_needs_no_import_that_the_boot_has_not_made(tmp_path: Path) -> None:
    """A third of a second of imports would be added to each run."""
    shutil.copytree(REHEARSAL, tmp_path / "run")
    code = """
import sys
from pathlib import Path
from vllm_repro.running import run
from vllm_repro.report.summary import summary
from vllm_repro.running.trial import _while_booting
_while_booting(None)
before = set(sys.modules)
from vllm_repro.report import build, files
report = build.build(Path(sys.argv[1]))
files.write_reports(report)
summary(report)
new = set(sys.modules) - before - {"rich._emoji_codes", "encodings.unicode_escape"}
print(sorted(new))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def tokenize(exchange: Exchange) -> None:
    """Count the words of a chat, 7 for each tool and 5 for each option of its template."""
    body = exchange.body
    words = sum(len(str(message["content"]).split()) for message in body["messages"])
    extra = 7 * len(body.get("tools", ())) + 5 * len(body.get("chat_template_kwargs", ()))
    exchange.answer(200, {"count": words + extra})


def tokenize_prompt(exchange: Exchange) -> None:
    """Return a token for each word, the same for the same word."""
    tokens = [sum(map(ord, word)) for word in exchange.body["prompt"].split()]
    exchange.answer(200, {"count": len(tokens), "tokens": tokens})


def test_a_chat_is_counted_with_its_tools_and_template(tmp_path: Path) -> None:
    """Without them a prompt would cross a boundary that it should not reach."""
    sent: list[dict[str, Any]] = []
    request = chat(
        prompt=60,
        stream=False,
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": True},
    )
    paths = {"/tokenize": tokenize, "/v1/chat/completions": keeping(sent)}
    tried(tmp_path, paths, arm=replace(ARM, workload=(request,)))
    assert len(sent[0]["messages"][0]["content"].split()) == 60 - 7 - 5


def test_a_conversation_grows_by_replies_and_results_of_its_tool(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    turns = conversation(first=50, adds=[30, 30], tools=[tool], stream=False)
    paths = {"/tokenize": tokenize, "/v1/chat/completions": keeping(sent)}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(turns,)))
    roles = [message["role"] for message in sent[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    calls = [said["tool_calls"][0] for said in sent[2]["messages"] if said["role"] == "assistant"]
    results = [said["tool_call_id"] for said in sent[2]["messages"] if said["role"] == "tool"]
    assert [call["id"] for call in calls] == results == ["call_1", "call_2"]
    assert calls[0]["function"] == {"name": "look", "arguments": "{}"}
    assert sent[2]["messages"][:3] == sent[1]["messages"]
    assert [asked.repeats for asked in trial.seen.requests] == [0, 50, 80]


@pytest.mark.parametrize(("kind", "repeats"), [(ServerKind.LAB, 32), (ServerKind.PROCESS, 96)])
def test_a_shared_head_has_the_size_that_was_sent(
    tmp_path: Path, kind: ServerKind, repeats: int
) -> None:

    request = completion(prompt=128, shared=sized(96, lab=32))
    arm = replace(ARM, workload=(request, request))
    paths = {"/tokenize": tokenize_prompt}
    _, trial = tried(tmp_path, paths, arm=arm, launch=replace(LAUNCH, kind=kind))
    assert [asked.repeats for asked in trial.seen.requests] == [0, repeats]
    sent = {entry["body"]["prompt"] for entry in journaled(tmp_path, "request-sent")}
    assert sent == {f"(128 tokens, the first {repeats} shared)"}


def test_a_prompt_of_ids_is_sent_as_it_is_and_counted_exactly(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    uncounted = answering(200, {"choices": COMPLETION["choices"]})
    stated: dict[str, Any] = {
        "temperature": 0.5,
        "seed": 0,
        "stop": [],
        "suffix": "",
        "echo": False,
    }
    first, second = (
        completion(prompt=[7] * 64),
        completion(prompt=[*[7] * 48, 8], name="second", **stated),
    )
    paths = {"/v1/completions": keeping(sent, uncounted), "/tokenize": answering(500)}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(first, second)))
    assert sent[1].items() >= {**stated, "prompt": [*[7] * 48, 8]}.items()
    asked = trial.seen.requests
    counts = [(request.prompt_tokens, request.counted_by, request.repeats) for request in asked]
    assert counts == [(64, "ids", 0), (49, "ids", 48)]
    # What the scenario states can be the evidence of a trigger.
    assert asked[1].fields == {**stated, "stop": ()}
    bodies = {entry["name"]: entry["body"] for entry in journaled(tmp_path, "request-sent")}
    assert bodies["second"]["prompt"] == [*[7] * 48, 8]


EMBEDDED = {
    "object": "list",
    "data": [{"embedding": [0.5]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


def test_a_server_without_completions_can_be_asked(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    paths = dict.fromkeys(("/v1/embeddings", "/pooling"), keeping(sent, answering(200, EMBEDDED)))
    paths["/v1/completions"] = answering(404, {"detail": "Not Found"})
    body = {"input": [1, 2, 3], "dimensions": 0}
    workload = (
        request(path="/v1/embeddings", body=body, name="one"),
        request(
            path="/v1/embeddings", body={"model": "adapter", "input": [[1], [2, 3]]}, name="two"
        ),
    )
    conclusion, trial = tried(
        tmp_path, paths, arm=replace(ARM, workload=workload, trigger=answered("one", 200))
    )
    assert (conclusion.outcome, conclusion.sent, conclusion.ok) == (Outcome.CLEAN, 2, 2)
    assert (sent[0], sent[1]["model"]) == ({"model": "tiny", **body}, "adapter")
    assert sent[2]["input"] == "hello", "the canary"
    # Two prompts are no prompt of their sum.
    assert [asked.prompt_tokens for asked in trial.seen.requests] == [3, None]
    bodies = [body, {"model": "adapter", "input": [[1], [2, 3]]}]
    assert [entry["body"] for entry in journaled(tmp_path, "request-sent")] == bodies


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, Outcome.UNTRIGGERED), (400, Outcome.CLEAN), (500, Outcome.WRONG_OUTPUT)],
)
def test_the_failure_of_any_request_counts(tmp_path: Path, status: int, outcome: Outcome) -> None:
    paths = {"/score": answering(status, {} if status == 200 else {"error": "no"})}
    scored = request(path="/score", body={"text_1": "a", "text_2": "b"}, name="score")
    arm = replace(ARM, workload=(scored,), trigger=answered("score", 400))
    assert concluded(tmp_path, paths, arm=arm).outcome is outcome


@pytest.mark.parametrize(("hits", "cached"), [(96, 96), (0, 0), (128, None), (5000, None)])
def test_hits_of_other_clients_are_not_those_of_a_request(
    tmp_path: Path, hits: int, cached: int | None
) -> None:
    answered: list[dict[str, Any]] = []
    counts = {**COMPLETION, "usage": {"prompt_tokens": 128, "completion_tokens": 1}}

    def metrics(exchange: Exchange) -> None:
        counted = hits * bool(answered)
        exchange.answer(200, f"{METRICS}vllm:prefix_cache_hits_total {counted}\n", "text/plain")

    paths = {"/v1/completions": keeping(answered, answering(200, counts)), "/metrics": metrics}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(completion(prompt="hello"),)))
    assert trial.seen.requests[0].cached_tokens == cached


def test_a_count_below_nothing_is_no_count(tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": 128,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": -1},
    }
    paths = {"/v1/completions": answering(200, {**COMPLETION, "usage": usage})}
    assert tried(tmp_path, paths)[1].seen.requests[0].cached_tokens is None


@pytest.mark.parametrize(
    ("takes", "waiting", "outcome"),
    [(0.6, 1, Outcome.CLEAN), (0.6, 0, Outcome.UNTRIGGERED), (0.0, 1, Outcome.UNTRIGGERED)],
)
def test_a_client_may_leave_before_its_answer(
    tmp_path: Path, takes: float, waiting: int, outcome: Outcome
) -> None:
    """It is no server failure, and a trigger only if the server counted a waiting request then."""
    came: list[dict[str, Any]] = []

    def completions(exchange: Exchange) -> None:
        time.sleep(takes * (exchange.body["prompt"] == "short"))
        exchange.answer(200, COMPLETION)

    counted = f"{METRICS}vllm:num_requests_waiting {waiting}\n"
    paths = {
        "/v1/completions": keeping(came, completions),
        "/metrics": answering(200, counted, "text/plain"),
    }
    leaving = completion(name="leaves", prompt="short", starts_after=0.2, leaves_after=0.3)
    workload = (together(leaving, completion(name="busy", prompt="long")),)
    conclusion, _ = tried(
        tmp_path, paths, arm=replace(ARM, workload=workload, trigger=left_waiting("leaves"))
    )
    assert (conclusion.outcome, conclusion.sent - conclusion.ok) == (outcome, 0)
    assert [body["prompt"] for body in came[:2]] == ["long", "short"]
    left = [entry["waiting"] for entry in journaled(tmp_path, "client-left")]
    assert left == ([waiting] if takes else [])
