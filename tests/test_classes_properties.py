"""Classes of paths: what holds for all rules and all paths.

A second evaluator, written for clarity, goes through the rules one by one and matches component by component with
`fnmatch`. Where gitignore itself is in question, pathspec is asked as well.
"""

import fnmatch
import itertools
import json

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

from deltapool.fs.classes import HOST_PATTERNS, FileClass, Rule, RuleError, Rules, combine

WORK, JOURNAL, CACHE, HOST = FileClass
DEFAULT = Rules.defaults()

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=200)


def naive_exact(segments: list[str], components: list[str]) -> bool:
    if not segments:
        return not components
    if segments[0] == "**":
        if segments[1:] == []:
            return bool(components)
        return any(naive_exact(segments[1:], components[n:]) for n in range(len(components) + 1))
    return (
        bool(components)
        and fnmatch.fnmatchcase(components[0], segments[0])
        and naive_exact(segments[1:], components[1:])
    )


def naive_match(pattern: str, file_class: FileClass, components: list[str], is_dir: bool) -> bool:
    segments = pattern.removesuffix("/").split("/")
    if segments[0] == "":
        segments = segments[1:]
    elif len(segments) == 1:
        segments = ["**", *segments]
    if segments[-1] == "**":
        segments = [*segments, "*"]
    if file_class is JOURNAL:
        return not is_dir and naive_exact(segments, components)
    return any(
        naive_exact(segments, components[:n]) and (n < len(components) or is_dir or not pattern.endswith("/"))
        for n in range(1, len(components) + 1)
    )


def naive_verdict(rules: Rules, components: list[str], is_dir: bool) -> FileClass:
    found = WORK
    for rule in rules.rules:
        if naive_match(rule.pattern, rule.file_class, components, is_dir):
            found = rule.file_class
    return found


def naive_classify(rules: Rules, components: list[str], is_dir: bool, tagged: bool) -> FileClass:
    verdict = naive_verdict(rules, components, is_dir)
    if tagged and verdict is not HOST and ".git" not in components:
        verdict = CACHE
    if verdict is CACHE:
        if any(naive_match(pattern, HOST, components, is_dir) for pattern in HOST_PATTERNS):
            return HOST
        for at, name in enumerate(components):
            if name == ".git" and (at == 0 or naive_verdict(rules, components[:at], True) is not CACHE):
                return WORK
    return verdict


NAMES = st.sampled_from(
    [
        *"a b ab abc x.jsonl x.jsonl.lock .x .git HEAD .ssh go pkg mod .cache uv .codex auth.json .netrc [a] é".split(),
        "a\nb",
        "x.jsonl\n",
        "\udcff",
    ]
)
PATHS = st.lists(NAMES, min_size=1, max_size=6)
SEGMENTS = st.sampled_from(
    "a b ab * ? a* *b *.jsonl [ab] [!a] [!.]* x.* .* ** .git .ssh go mod uv HEAD auth.json *a*b* ?? [a]* é".split(" ")
)
CLASSES = st.sampled_from(FileClass)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    body = "/".join(draw(st.lists(SEGMENTS, min_size=1, max_size=4)))
    return draw(st.sampled_from(["", "", "/"])) + body + draw(st.sampled_from(["", "", "/"]))


@st.composite
def rule_lists(draw: st.DrawFn) -> Rules:
    """Rules that were not checked for safety: classify has to hold by itself."""
    rules = []
    for number, (pattern, file_class) in enumerate(draw(st.lists(st.tuples(patterns(), CLASSES), max_size=6))):
        if file_class is JOURNAL:
            pattern = pattern.removesuffix("/")
        rules.append(Rule(pattern, file_class, "random", number))
    return Rules(rules)


def encode(components: list[str]) -> bytes:
    return "/".join(components).encode("utf-8", "surrogateescape")


@repeatable
@given(rule_lists(), PATHS, st.booleans(), st.booleans())
def test_the_last_match_wins(rules: Rules, path: list[str], is_dir: bool, tagged: bool) -> None:
    assert rules.classify(encode(path), is_dir, tagged) is naive_classify(rules, path, is_dir, tagged)


@repeatable
@given(patterns(), PATHS, st.booleans())
def test_one_rule_is_what_pathspec_says(pattern: str, path: list[str], is_dir: bool) -> None:
    assume("**" not in pattern.strip("/").rpartition("/")[2])  # there pathspec differs from git
    assume(all("\n" not in name for name in path))
    expected = GitIgnoreSpec.from_lines([pattern]).match_file("/".join(path) + ("/" if is_dir else ""))
    rules = Rules([Rule("*", WORK, "random", 1), Rule(pattern, HOST, "random", 2)])
    assert rules.classify(encode(path), is_dir) is (HOST if expected else WORK)


@repeatable
@given(st.binary(min_size=1, max_size=40), st.booleans(), st.booleans())
def test_no_name_is_too_strange(path: bytes, is_dir: bool, tagged: bool) -> None:
    assert DEFAULT.classify(path, is_dir, tagged) in FileClass
    DEFAULT.may_change_below(path, path + b"x")


@repeatable
@given(st.text(st.sampled_from('[]rule\n="!x/*.git\\ '), max_size=60))
@example('[[rule]]\nmatch="')
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        Rules.parse(text, "rules.toml")
    except RuleError as error:
        message = str(error)
    else:
        return
    assert message.startswith("rules.toml, line ")


@repeatable
@given(st.lists(st.tuples(patterns(), st.sampled_from(["work", "cache", "host"])), max_size=4), PATHS, st.booleans())
def test_what_parse_accepts_never_makes_a_host_file_or_bare_git_cache(
    rules: list[tuple[str, str]], path: list[str], is_dir: bool
) -> None:
    tables = (f"[[rule]]\nmatch = {json.dumps(match)}\nclass = '{label}'\n" for match, label in rules)
    try:
        accepted = Rules.parse("".join(tables), "rules.toml")
    except RuleError:
        return
    verdict = accepted.classify(encode(path), is_dir)
    if path[0] == ".git" or any(naive_match(pattern, HOST, path, is_dir) for pattern in HOST_PATTERNS):
        assert verdict is not CACHE


@repeatable
@given(st.lists(CLASSES, max_size=5), st.lists(CLASSES, max_size=5))
def test_combine_is_about_a_set_of_names(some: list[FileClass], others: list[FileClass]) -> None:
    assert combine(reversed(some)) is combine(some) is combine(some + some)
    for one in FileClass:
        assert combine([one]) is one
    if some and others:
        assert combine(some + others) is combine([combine(some), combine(others)])
    assert (combine(some + others) is HOST) == (HOST in some + others)


@settings(repeatable, max_examples=400)
@given(rule_lists(), PATHS, PATHS, st.integers(0, 6), st.lists(PATHS, min_size=1, max_size=6))
def test_a_rename_without_a_walk_changes_no_class(
    rules: Rules, old: list[str], new: list[str], shared: int, descendants: list[list[str]]
) -> None:
    new = old[:shared] + new
    if rules.may_change_below(encode(old), encode(new)):
        return
    for below, is_dir, tagged in itertools.product(descendants, (False, True), (False, True)):
        before, after = (rules.classify(encode(above + below), is_dir, tagged) for above in (old, new))
        assert before is after, ascii(below)
