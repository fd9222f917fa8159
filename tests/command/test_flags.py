from __future__ import annotations

import pytest
from packaging.version import Version

from tests.command.texts import REPORTED, reported
from vllm_repro.command import flag_table
from vllm_repro.command.command import parse
from vllm_repro.command.flag_syntax import canonical
from vllm_repro.command.flags import NoteLevel, known_flags, unknown_flags
from vllm_repro.errors import UsageError


def notes(flags: str, version: str | None = None) -> list[tuple[str, str, NoteLevel]]:
    return [(flag, near, level) for flag, near, _, level in unknown_flags(parse(f"vllm serve m {flags}"), version)]


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.parametrize("version", [None, "0.19.1", "0.20.2rc1.dev35+g4845aee6b", "0.23.0", "0.32.0"])
def test_the_reported_commands_have_nothing_unknown(name: str, version: str | None) -> None:
    assert unknown_flags(parse(reported(name)), version) == []


@pytest.mark.parametrize(
    ("flag", "replacement"),
    [
        ("--disable-log-requests", "--no-enable-log-requests"),
        ("--swap-space 4", ""),
        ("--use-v2-block-manager", ""),
    ],
)
def test_flags_of_old_recipes_are_refused_with_what_to_do(flag: str, replacement: str) -> None:
    (note,) = unknown_flags(parse(f"vllm serve m {flag}"), None)
    assert (note.near, note.level) == (replacement, NoteLevel.REFUSED)
    assert replacement in note.why
    assert str(note).startswith(f"{note.flag}: not defined in any release")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--enforce-eagr", "--enforce-eager"),
        ("--max-model-length 5", ""),
        ("--max-modle-len 5", "--max-model-len"),
        ("--max-num-batch-tokens 5", "--max-num-batched-tokens"),
        ("--no-enable-prefix-cachng", "--no-enable-prefix-caching"),
        ("--prot 1", "--port"),
        ("--sede 1", "--seed"),
        ("--cc 1", ""),
        ("--compilaton-config.mode 3", "--compilation-config"),
    ],
)
def test_near_misses_are_typos_and_others_only_noted(typed: str, meant: str) -> None:
    (note,) = unknown_flags(parse(f"vllm serve m {typed}"), "0.23.0")
    assert note.near == meant
    assert note.level is (NoteLevel.TYPO if meant else NoteLevel.UNLISTED)


@pytest.mark.parametrize(
    ("flag", "refusing", "having"),
    [
        ("--spec-method mtp", ["0.20.2", "0.21.0"], ["0.22.0", "0.22.1", "0.32.0"]),
        ("--mamba-backend x", ["0.19.0", "0.19.1"], ["0.20.0", "0.20.2"]),
        ("--watermark 1", ["0.23.0"], ["0.24.0", "0.25.1"]),
        ("--max-num-active-seqs 3", ["0.30.0"], ["0.31.0"]),
        ("--calculate-kv-scales", ["0.28.0", "0.32.0"], ["0.20.2", "0.27.1"]),
        ("--max-num-partial-prefills 2", ["0.27.0", "0.28.0"], ["0.26.0"]),
        ("--enable-mixed-moe-lora-format", ["0.20.2"], ["0.23.0", "0.28.0"]),
    ],
)
def test_a_release_refuses_what_it_lacks(flag: str, refusing: list[str], having: list[str]) -> None:
    name = flag.split()[0]
    for version in refusing:
        assert notes(flag, version) == [(name, "", NoteLevel.REFUSED)], version
    for version in having:
        assert notes(flag, version) == [], version
    assert notes(flag) == []


@pytest.mark.parametrize(
    ("flag", "version", "refused"),
    [
        ("--spec-tokens 2", "0.20.2rc1.dev35+g4845aee6b", True),
        ("--spec-tokens 2", "0.21.1rc1.dev169", False),
        ("--spec-tokens 2", "v0.21.0", True),
        ("--calculate-kv-scales", "0.28.1.dev3", True),
    ],
)
def test_a_nightly_may_have_what_the_next_release_brings(flag: str, version: str, refused: bool) -> None:
    assert bool(notes(flag, version)) is refused


def test_only_switches_have_a_no_form() -> None:
    assert notes("--no-trust-remote-code") == []
    assert [level for _, _, level in notes("--no-max-model-len")] == [NoteLevel.UNLISTED]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--scheduling-policy", True),
        ("--seed --enforce-eager", True),
        ("--served-model-name --seed 1", True),
        ("--seed 0 --chat-template=", False),
        ("--enforce-eager --no-enable-prefix-caching --hf-token", False),
        ("--compilation-config.cudagraph_mode", False),
        ("--of-a-plugin", False),
    ],
)
def test_a_flag_lacks_its_value(flags: str, refused: bool) -> None:
    found = [note for note in unknown_flags(parse(f"vllm serve m {flags}"), None) if note.level is NoteLevel.REFUSED]
    assert [note.why for note in found] == ["has no value"] * refused


def test_keys_below_a_config_are_not_looked_up() -> None:
    assert notes("--compilation-config.cudagraph_mode none -cc.nonsense 1") == []


def test_a_version_must_be_one() -> None:
    with pytest.raises(UsageError, match="is not a vLLM version"):
        notes("--seed 1", "nightly")


class TestTable:
    def test_no_flag_is_listed_twice(self) -> None:
        rows = [
            flag_table.SEEN_THROUGHOUT,
            *flag_table.FIRST_SEEN.values(),
            *flag_table.ADDED.values(),
            *flag_table.REMOVED.values(),
        ]
        names = [name for row in rows for name in row.split()]
        assert len(names) == len(set(names))
        assert not set(names) & set(flag_table.NEVER_DEFINED)

    def test_names_are_canonical(self) -> None:
        for name in known_flags():
            assert canonical(name) == name
            assert not name.startswith("--no-")

    def test_tables_of_spelling_name_flags_that_exist(self) -> None:
        spelled = {
            *flag_table.SHORT_FORMS.values(),
            *flag_table.SWITCHES,
            *flag_table.MULTI_VALUED,
            *flag_table.JSON_FLAGS,
            *flag_table.JSON_IN_BRACES,
            *flag_table.VALUE_OPTIONAL,
        }
        assert spelled <= set(known_flags())

    def test_lives_are_in_order(self) -> None:
        for name, known in known_flags().items():
            assert known.since is None or known.absent_to is None or known.absent_to < known.since, name
            assert known.gone_by is None or known.gone_by > Version("0.20.2"), name
