"""Search of EngineCore on real releases: it finds planted faults and reported bugs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.patch import Patch
from vllm_repro_explore import forks
from vllm_repro_explore.draw import draw
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.finding import FindingKind
from vllm_repro_explore.finding import known as known_as

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

RELEASE = "0.32.0"
SCHEDULER, POOL = "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/block_pool.py"
MANAGERS, HASHES = "vllm/v1/core/single_type_kv_cache_manager.py", "vllm/v1/core/kv_cache_utils.py"
PLANTED: dict[str, tuple[str, Patch]] = {
    "a shared block is not held": (
        "plain",
        Patch(
            POOL,
            was=(
                "                self.free_block_queue.remove(block)\n            block.ref_cnt"
                " += 1\n"
            ),
            now="                self.free_block_queue.remove(block)\n",
        ),
    ),
    "an evicted block keeps its hash": (
        "plain",
        Patch(
            POOL,
            was="evicted_hashes = self._remove_cached_block_hashes(block)\n",
            now="evicted_hashes = None\n",
        ),
    ),
    "the hash forgets the salt": (
        "plain",
        Patch(
            HASHES, was="(start_token_idx == 0 and request.cache_salt)", now="(start_token_idx < 0)"
        ),
    ),
    "the hash forgets the adapter": (
        "plain",
        Patch(HASHES, was="lora_extra_keys + mm_extra_keys + cache", now="mm_extra_keys + cache"),
    ),
    "the hash forgets the blocks before": (
        "ends",
        Patch(HASHES, was="(parent_block_hash, curr_block", now="(NONE_HASH, curr_block"),
    ),
    "a window ends a block early": (
        "plain",
        Patch(
            MANAGERS,
            was=(
                "            num_computed_tokens - self.sliding_window + 1 -"
                " self.extra_retained_tokens,\n"
            ),
            now="            num_computed_tokens - self.sliding_window + 1 + self.block_size,\n",
        ),
    ),
    "a token is counted twice": (
        "plain",
        Patch(
            SCHEDULER,
            was="            request.num_computed_tokens += num_scheduled_token\n",
            now=(
                "            request.num_computed_tokens += num_scheduled_token +"
                " (request.num_computed_tokens == 37)\n"
            ),
        ),
    ),
    "a hit may be the whole prompt": (
        "plain",
        Patch(
            "vllm/v1/core/kv_cache_manager.py",
            was="        max_cache_hit_length = request.num_tokens - 1\n",
            now="        max_cache_hit_length = request.num_tokens\n",
        ),
    ),
    "a rejected draft stays counted": (
        "spec",
        Patch(SCHEDULER, was="request.num_computed_tokens -= num_rejected", now="pass"),
    ),
    "a grammar does not follow the answer": (
        "grammar",
        Patch(
            SCHEDULER,
            was="if new_token_ids and not self.structured_output_manager.accept_tokens(",
            now="if not new_token_ids and not self.structured_output_manager.accept_tokens(",
        ),
    ),
    "a session forgets what it answered": (
        "stream",
        Patch(
            SCHEDULER,
            was="        del session._all_token_ids[num_computed_tokens:]\n",
            now="        del session._all_token_ids[session.num_prompt_tokens:]\n",
        ),
    ),
    "a Mamba state is freed while it is needed": (
        "mamba",
        Patch(
            MANAGERS,
            was="                < cdiv(processed_computed_tokens, self.block_size) - 1\n",
            now="                <= cdiv(processed_computed_tokens, self.block_size) - 1\n",
        ),
    ),
    "a prompt that failed to come counts as computed": (
        "fetch",
        Patch(
            SCHEDULER,
            was=(
                "                    request.num_computed_tokens = 0\n                   "
                " self.failed_recving_kv_req_ids.add(req_id)\n"
            ),
            now="                    self.failed_recving_kv_req_ids.add(req_id)\n",
        ),
    ),
    "a sleep keeps the prefix cache": (
        "sleep",
        Patch(
            "vllm/v1/engine/core.py",
            was="        if not self.reset_prefix_cache(\n",
            now="        if False and not self.reset_prefix_cache(\n",
        ),
    ),
    "a block is freed while it is stored": (
        "off",
        Patch(
            "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
            was="            jobs_to_flush=self._current_batch_jobs_to_flush,\n",
            now="            jobs_to_flush=set(),\n",
        ),
    ),
    "a paused engine computes": (
        "pause",
        Patch(
            SCHEDULER,
            was=(
                "            # Do not schedule any requests when paused.\n"
                "            token_budget = 0\n"
            ),
            now="            pass\n",
        ),
    ),
    "skipped requests count as waiting, too": (
        "chat-off",
        Patch(SCHEDULER, was="num_waiting - num_deferred,", now="num_waiting,"),
    ),
    "drafts lie beyond the model's length": (
        "ends",
        Patch(
            SCHEDULER,
            was=(
                "                self.max_model_len\n"
                "                - request.num_computed_tokens\n"
                "                - self.num_sampled_tokens_per_step,\n"
            ),
            now="                num_new_tokens,\n",
        ),
    ),
    "drafts of a preempted request stay in the step": (
        "urgent-spec",
        Patch(
            SCHEDULER,
            was="scheduled_spec_decode_tokens.pop(preempted_req_id, None)",
            now="pass",
        ),
    ),
    "a reset loses room of the CPU's cache": (
        "reset-off",
        Patch(
            "vllm/v1/kv_offload/cpu/manager.py",
            was="        self._free_list.clear()\n        self._num_allocated_chunks = 0\n",
            now="        self._free_list.clear()\n",
        ),
    ),
    "a finished request keeps its blocks": (
        "plain",
        Patch(
            SCHEDULER,
            was="        if not delay_free_blocks:\n            self._free_blocks(request)",
            now="        if False:\n            self._free_blocks(request)",
        ),
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(
        provision(Source(release=RELEASE)),
        driver_model(),
        tmp_path_factory.mktemp("sound") / "driver.log",
    ) as driver:
        yield driver


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, sound: Driver, tmp_path: Path) -> None:
    mix, patch = PLANTED[fault]
    release = provision(Source(release=RELEASE))
    broken = replace(
        release, packages=make_overlay(cache_root(), release.packages, [patch], print).folder
    )
    with Driver(broken, driver_model(), tmp_path / "driver.log") as driver:
        cases = (draw(seed, mix) for seed in range(1, 401))
        assert any(
            driver.play(case).worst is not None and sound.play(case).worst is None for case in cases
        )


@pytest.mark.parametrize(
    ("version", "mix", "known"),
    [
        ("0.20.2", "sco-long", "vllm-project/vllm#42085"),
        ("0.21.0", "grammar", "vllm-project/vllm#43920"),
        (
            "0.29.0",
            "stream",
            "vllm-project/vllm#35755; vllm-project/vllm#57562 has the same frames",
        ),
        ("0.28.0", "mamba-nixl", "vllm-project/vllm#44526, or vllm-project/vllm#53706 with NIXL"),
        (
            "0.32.0",
            "store-late",
            "vllm-project/vllm#46240; the scenario kv-abort-reported-twice",
        ),
        ("0.32.0", "ops-off", "no report found; the scenario offloading-reset-running"),
    ],
)
def test_a_death_is_found_again_and_named(
    version: str, mix: str, known: str, tmp_path: Path
) -> None:
    with Driver(
        provision(Source(release=version)), driver_model(), tmp_path / "driver.log"
    ) as driver:
        worst = (driver.play(draw(seed, mix)).worst for seed in range(1, 401))
        deaths = (
            finding
            for finding in worst
            if finding is not None and finding.kind is FindingKind.DEATH
        )
        assert known in map(known_as, deaths)
        *_, server = forks._servers.values()
        assert "bare" not in psutil.Process(server._process.pid).cmdline()


def test_the_seeds_that_find_a_death_kill_no_fixed_release(tmp_path: Path) -> None:
    with Driver(
        provision(Source(release="0.24.0")), driver_model(), tmp_path / "driver.log"
    ) as driver:
        results = [driver.play(draw(seed, "sco-long")) for seed in range(1, 301)]
    assert not [result.invalid for result in results if result.invalid]
    # Cases that reach no event would find nothing in any release.
    for name in ("stores", "loads", "hits", "preempted"):
        assert sum(result.counts.get(name, 0) > 0 for result in results) >= 20, name
    assert [
        one for result in results for one in result.findings if one.kind is FindingKind.DEATH
    ] == []
