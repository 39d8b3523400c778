"""Classes of paths: what the defaults say, what a rule file may say, and what is refused.

What holds for all rules and all paths is in test_classes_properties.
"""

import json
from pathlib import Path

import pytest

from deltapool.fs.classes import DEFAULTS, HOST_PATTERNS, OPTION_PATTERNS, FileClass, Rule, RuleError, Rules, combine
from deltapool.fs.errors import ConfigError

WORK, JOURNAL, CACHE, HOST = FileClass
DEFAULT = Rules.defaults()


def toml(*rules: tuple[str, str]) -> str:
    return "".join(f"[[rule]]\nmatch = {json.dumps(match)}\nclass = {json.dumps(label)}\n" for match, label in rules)


def parse(*rules: tuple[str, str]) -> Rules:
    return Rules.parse(toml(*rules), "rules.toml")


def test_the_numbers_are_format() -> None:
    assert {each.label: int(each) for each in FileClass} == {"work": 0, "journal": 1, "cache": 2, "host": 3}


# The defaults


@pytest.mark.parametrize(
    "path",
    [
        *"x.jsonl .jsonl .x.jsonl tmpab12.jsonl x.jsonl/y.jsonl home/.claude/projects/-work/0123.jsonl".split(),
        *"logs/a/conversation.jsonl home/.codex/sessions/2026/11/29/rollout-x.jsonl".split(),
        "a\nb/c\nd.jsonl",
    ],
)
def test_a_journal_by_default(path: str) -> None:
    assert DEFAULT.classify(path.encode(), False) is JOURNAL
    assert DEFAULT.classify(path.encode(), True) is WORK


@pytest.mark.parametrize(
    "path",
    [
        *"jsonl x.json x.JSONL x.jsonl.lock .jsonl.lock x.jsonl.zst x.jsonl~ .x.jsonl.swp .#x.jsonl #x.jsonl#".split(),
        *".events.jsonl.a1b2.tmp .conversation.jsonl.swp x.jsonl/y x.jsonl/y.jsonl/z x.jsonl.lock/y".split(),
        *["x.jsonl\n", "x.jsonl\ny"],
        *"a/.git .git/HEAD .git/refs/heads/x.jsonl a/.git/logs/refs/heads/x.jsonl".split(),
        *"logs.db-wal src/main.py build/x node_modules/a/index.js .venv/bin/python".split(),
        # Of these some may hold a token, but they are ordinary work far more often.
        *".npmrc .env auth.json config.json hosts.yml credentials token .claude.json .claude/settings.json".split(),
        *".codex/config.toml .docker/daemon.json .config/gh/config.yml .config/hubble/x".split(),
        ".ssh",  # a symbolic link
        *"go/pkg/mod pkg/mod/x xgo/pkg/mod/x go-build/x".split(),  # the first is a file
    ],
)
def test_work_by_default(path: str) -> None:
    assert DEFAULT.classify(path.encode(), False) is WORK


@pytest.mark.parametrize("above", ["", "home/", "a/b/home/me/"])
@pytest.mark.parametrize(
    "root", ["go/pkg/mod", ".cache/go-build", ".npm/_cacache", ".npm/_npx", ".cache/pip", ".cache/uv"]
)
def test_cache_roots(above: str, root: str) -> None:
    path = (above + root).encode()
    assert DEFAULT.classify(path, True) is CACHE
    for below in (b"/x", b"/x/y.jsonl", b"/x/.git/HEAD", b"/x/.git/refs/heads/y.jsonl"):
        assert DEFAULT.classify(path + below, False) is CACHE
    assert DEFAULT.classify(path + b"x", True) is WORK
    assert DEFAULT.classify(path.rpartition(b"/")[0], True) is WORK


@pytest.mark.parametrize("above", ["", "home/", "a/b/c/", "home/.cache/uv/x/", "x.jsonl/"])
@pytest.mark.parametrize("pattern", HOST_PATTERNS)
def test_host_files_at_any_depth(above: str, pattern: str) -> None:
    path = (above + pattern.removeprefix("**/").replace("*", "")).encode()
    if path.endswith(b"/"):
        assert DEFAULT.classify(path[:-1], True) is HOST
        path += b"x/y.jsonl"
    assert DEFAULT.classify(path, False) is HOST
    if pattern.endswith("*"):
        assert DEFAULT.classify(path + b".123.tmp", False) is HOST


def test_credentials_of_a_renamed_claude_directory() -> None:
    assert DEFAULT.classify(b"elsewhere/.credentials.json", False) is HOST
    assert DEFAULT.classify(b"elsewhere/.credentials.json.tmp.1", False) is HOST


def test_the_root_is_work_whatever_is_said() -> None:
    assert parse(("*", "journal")).classify(b"", True) is WORK
    assert DEFAULT.classify(b"", True, tagged=True) is WORK


# Rules


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("x", ["x", "a/x", "x/y", "a/x/y/z", "x/", "a/x/"], ["xx", "x\n", "ax", "a/xx/y"]),
        ("/x", ["x", "x/y"], ["a/x"]),
        ("x/", ["x/", "a/x/", "x/y", "a/x/y.jsonl", "x/y/"], ["x", "a/x"]),
        ("a/x", ["a/x", "a/x/y"], ["x", "b/a/x"]),
        ("**/a/x", ["a/x", "b/a/x", "b/c/a/x/y"], ["a/b/x"]),
        ("a/**/x", ["a/x", "a/b/x", "a/b/c/x/y"], ["b/a/x"]),
        ("a/**", ["a/x", "a/x/y", "a/x/"], ["a", "a/"]),
        ("a/**/", ["a/x/", "a/x/y"], ["a/x", "a/"]),
        ("*.o", ["x.o", ".o", "a/x.o", "x.o/y", "a\nb.o"], ["x.oo", "x.o\n"]),
        ("?", ["x", "\n", "é", "x/yy"], ["xx"]),
        ("[!a-c]", ["d", "x/yy"], ["a", "a/bb"]),
        ("x[!a]y", ["xby"], ["x/y", "xay"]),
        ("x[+-9]y", ["x0y", "x.y"], ["x/y"]),
        ("[[]x", ["[x"], ["x"]),
        ("a[]]b", ["a]b"], ["ab"]),
        ("\\!x", ["!x"], ["x"]),
        ("\\#x", ["#x"], ["x"]),
        ("x\\*", ["x*"], ["xx"]),
        ("x\\ ", ["x "], ["x"]),
        ("a /x", ["a /x"], ["a/x"]),
        ("a(b|c)+$", ["a(b|c)+$"], ["ab"]),
        ("*", ["x", "a/b", "x/"], []),
        ("*/", ["x/", "x/y"], ["x"]),
        ("/*/x", ["a/x"], ["x", "a/b/x"]),
    ],
)
def test_patterns_mean_what_they_mean_in_gitignore(pattern: str, yes: list[str], no: list[str]) -> None:
    rules = Rules([Rule(pattern, HOST, "rules.toml", 1)])
    assert [path for path in yes if rules.classify(path.removesuffix("/").encode(), path.endswith("/")) is WORK] == []
    assert [path for path in no if rules.classify(path.removesuffix("/").encode(), path.endswith("/")) is HOST] == []


def test_the_last_match_wins_over_the_defaults_too() -> None:
    rules = parse(("fixtures/", "work"), ("build/", "cache"), ("keep.jsonl", "journal"), (".ssh/", "work"))
    assert rules.classify(b"fixtures/x.jsonl", False) is WORK
    assert rules.classify(b"fixtures/build/x.jsonl", False) is CACHE
    assert rules.classify(b"build/fixtures/x.jsonl", False) is CACHE
    assert rules.classify(b"build/keep.jsonl", False) is JOURNAL
    assert rules.classify(b".ssh/config", False) is WORK
    assert rules.classify(b"x.jsonl", False) is JOURNAL


def test_a_journal_rule_matches_files_and_nothing_through_a_directory() -> None:
    rules = parse(("trace*", "journal"), ("logs/**", "journal"), ("/top/*", "journal"))
    assert rules.classify(b"trace1", False) is JOURNAL
    assert rules.classify(b"trace1", True) is WORK
    assert rules.classify(b"trace1/x", False) is WORK
    assert rules.classify(b"logs/a/b", False) is JOURNAL
    assert rules.classify(b"logs", False) is WORK
    assert rules.classify(b"top/a", False) is JOURNAL
    assert rules.classify(b"top/a/b", False) is WORK


@pytest.mark.parametrize("pattern", ["*", "**"])
def test_a_star_sends_every_path_to_journal(pattern: str) -> None:
    rules = parse((pattern, "journal"))
    for path in (b"x", b"a/b/c", b".git/HEAD", b"go/pkg/mod/x", b"\n", b"\xff/\xfe", b".#x.jsonl"):
        assert rules.classify(path, False) is JOURNAL
        assert rules.classify(path, True) in (WORK, CACHE)


def test_options_come_after_the_defaults_and_before_the_rules() -> None:
    off = Rules.parse("[options]\nnode_modules = false\n", "rules.toml")
    assert not off.cachedir_tag
    assert off.rules == DEFAULT.rules
    on = Rules.parse(
        "[options]\nvenv = true\nnode_modules = true\ncachedir_tag = true\n" + toml(("**/node_modules/mine/", "work")),
        "rules.toml",
    )
    assert on.cachedir_tag
    assert on.rules[len(DEFAULT.rules)] == Rule("node_modules/", CACHE, "rules.toml", 3)
    for path in (b"a/node_modules/x.jsonl", b"node_modules/a/.git/HEAD", b"a/.venv/bin/python", b".venv/x.jsonl"):
        assert on.classify(path, False) is CACHE
    assert on.classify(b"node_modules", False) is WORK  # a symbolic link
    assert on.classify(b"node_modules/a/.netrc", False) is HOST
    assert on.classify(b"node_modules/mine/x", False) is WORK


def test_limits_in_the_same_file_are_left_alone() -> None:
    rules = Rules.parse("[limits]\nthreads = 4\n" + toml(("x", "cache")), "config.toml")
    assert rules.rules[-1] == Rule("x", CACHE, "config.toml", 3)


def test_a_tag_makes_cache_but_for_host_files_and_git() -> None:
    rules = parse(("secret", "host"))
    for path in (b"target/x", b"target/x.jsonl", b"target/.gitignore"):
        assert rules.classify(path, False, tagged=True) is CACHE
    assert rules.classify(b"target", True, tagged=True) is CACHE
    assert rules.classify(b"target/secret", False, tagged=True) is HOST
    assert rules.classify(b"target/.ssh/config", False, tagged=True) is HOST
    assert rules.classify(b"a/.git/HEAD", False, tagged=True) is WORK
    assert rules.classify(b"go/pkg/mod/a/.git/HEAD", False, tagged=True) is CACHE


@pytest.mark.parametrize("name", [b"\xff", b"\xff\xfe.jsonl", b"\x80/\xc3", b"\xed\xa0\x80"])
def test_names_need_not_be_text(name: bytes) -> None:
    assert DEFAULT.classify(name, False) is (JOURNAL if name.endswith(b".jsonl") else WORK)
    assert DEFAULT.classify(b".cache/uv/" + name, True) is CACHE
    assert parse(("?", "host")).classify(b"\xff", False) is HOST


def test_a_hostile_name_costs_no_time() -> None:
    rules = parse(("*a*a*a*a*a*a*a*b", "work"), ("**/a/**/a/**/a/**/a/**/b", "cache"), ("[ab]*[ab]*[ab]*c/x", "host"))
    assert rules.classify(b"a" * 255, False) is WORK
    assert rules.classify(b"/".join([b"a"] * 2000), False) is WORK
    assert rules.classify(b"/".join([b"a"] * 2000 + [b"b"]), False) is CACHE
    assert rules.classify(b"/".join([b"ab" * 120] * 17), False) is WORK


# What is refused


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[[rule]]\nmatch = 'x'\nclass = 'work'\n\n[[rule]]\nmatch = '!x'\nclass = 'work'\n", 5, "write a later rule"),
        ("[[rule]]\nmatch = 'x'\nclass = 'wrok'", 1, "'wrok'"),
        ("\n[[rule]]\nmatch = 'x'", 2, "needs class"),
        ("[[rule]]\nclass = 'work'", 1, "needs match"),
        ("[[rule]]\nmatch = 1\nclass = 'work'", 1, "needs match"),
        ("[[rule]]\nmatch = 'x'\nclass = 2", 1, "needs class"),
        ("[[rule]]\nmatch = 'x'\nclass = 'work'\nnegate = true", 1, "unknown key 'negate'"),
        ("\n[rules]\nx = 1", 2, "unknown key 'rules'"),
        ("x = 1", 1, "unknown key 'x'"),
        ("[options]\nvenv = true\nvenvs = true", 3, "takes cachedir_tag, node_modules, venv"),
        ("[options]\n\nvenv = 1", 3, "each true or false"),
        ("\noptions = true", 2, "each true or false"),
        ("\nrule = 5", 2, "begin each rule"),
        ("\nrule = [{match = 'x', class = 'work'}]", 2, "begin each rule"),
        ("\n[rule]\nmatch = 'x'", 2, "begin each rule"),
        ("rule = [1]\n[limits]\nx = '''\n[[rule]]\n'''", 1, "begin each rule"),
        ("\n\n[[rule]\nmatch = 'x'", 3, "not TOML"),
        ("\n[[rule]]\nmatch = 'x", 3, "not TOML"),
        ("\n[[rule]]\nmatch = ", 3, "not TOML"),
        ("x = " + "[" * 100_000, 1, "not TOML"),
        ("x = " + "9" * 10_000, 1, "not TOML"),
        (toml(*[("x", "work")] * 251), 751, "more than 250"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        Rules.parse(text, "etc/rules.toml")
    assert str(caught.value).startswith(f"etc/rules.toml, line {line}: ")
    assert message in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "pattern",
    [
        *["", "/", "//", "!x", "#x", "x ", "x\t", "x\n", " ", "a//b", "x//", "./x", "a/../b", "..", "x\\", "a\\/b"],
        *["[", "[a", "a[]", "[a/b]", "[!/]", "[z-a]", "[[:alpha:]]", "[\\]]", "[a--b]", "***", "a**", "**b", "a**/b"],
        "x" * 1001,
    ],
)
def test_bad_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(RuleError, match=r"^rules\.toml, line 4: match = "):
        parse(("x", "work"), (pattern, "host"))


def test_a_journal_rule_for_directories_is_refused() -> None:
    with pytest.raises(RuleError, match=r"line 1: .*write /\*\* there"):
        parse(("logs/", "journal"))


@pytest.mark.parametrize(
    "pattern",
    [
        *[
            "*",
            "**",
            "/*",
            ".*",
            "*/",
            "/*/",
            ".git",
            ".git/",
            "/.git",
            "**/.git/",
            "*.git",
            ".g?t/",
            ".git*",
            ".[!x]*/",
        ],
        *["HEAD", "index", "objects/", "*.pack", ".git/lfs/", ".git/**", "a/.git", "a/*/.git/objects/", "[.]git/"],
        *["src/*", "src/*/", "src/**", "a/*/b/*", "a/**/*", "*/*"],
        *[".ssh/", ".ssh/known_hosts", "/.ssh/", "a/.ssh/", "home/*/.ssh/", "home/*/.ssh/id_*", "id_ed25519", ".s*/"],
        *[".netrc", "*rc", "*.json", "auth.json", ".codex/*", ".codex/auth.json", "home/me/.codex/auth.json"],
        *[".credentials.json", "*/gh/*", ".config/gh/hosts.yml", ".aws/", ".kube/", ".azure/", "*.toml", ".env"],
    ],
)
def test_a_rule_that_would_make_git_or_a_host_file_cache_is_refused(pattern: str) -> None:
    with pytest.raises(RuleError, match=r"^rules\.toml, line 4: .* would make \S+ cache"):
        parse(("unrelated/", "cache"), (pattern, "cache"), ("unrelated/", "work"))


@pytest.mark.parametrize(
    "pattern",
    [
        *[
            "build/",
            "target/",
            "/dist",
            "*.o",
            "*.tmp",
            "*.log",
            "__pycache__/",
            ".cache/",
            "/.cache/",
            "node_modules/",
        ],
        *["?*.git", ".gitignore", ".github/", "logs/", "home/me/projects/", "**/.mypy_cache/", "x/**/y", ".git2/"],
        *[
            "go/pkg/mod/**",
            "build/.git/",
            ".cache/uv/.git/",
            "*.pyc",
            "*~",
            "main",
            "x",
            ".config/gh/",
            "x.jsonl",
            "*.jsonl",
        ],
    ],
)
def test_ordinary_cache_rules_are_accepted(pattern: str) -> None:
    rules = parse(("build/", "cache"), (pattern, "cache"))
    assert rules.rules[-1].pattern == pattern


def test_a_later_rule_may_take_back_what_would_be_refused() -> None:
    with pytest.raises(RuleError, match=r"line 1: .* would make src/\.git"):
        parse(("src/*", "cache"), (".ssh/", "host"))
    rules = parse(("src/*", "cache"), (".git/", "work"), (".git", "work"), *((each, "host") for each in HOST_PATTERNS))
    assert rules.classify(b"src/a", True) is CACHE
    assert rules.classify(b"src/.git/HEAD", False) is WORK
    assert rules.classify(b"src/.ssh/config", False) is HOST


def test_the_rule_that_decides_is_named() -> None:
    with pytest.raises(RuleError, match=r"line 4: match = '\.git/'"):
        parse((".git/", "work"), (".git/", "cache"), ("HEAD", "work"))


def test_git_and_host_files_are_never_cache_by_chance() -> None:
    rules = parse(("build/", "cache"), ("*.tmp", "cache"), ("logs/", "cache"))
    assert rules.classify(b".git/refs/heads/build/x", False) is WORK
    assert rules.classify(b".git/refs/heads/build", True) is WORK
    assert rules.classify(b"a/.git/index.tmp", False) is WORK
    assert rules.classify(b"a/.git/logs/HEAD", False) is WORK
    assert rules.classify(b"build/.git/HEAD", False) is CACHE
    assert rules.classify(b".git/build/.git/HEAD", False) is WORK
    assert rules.classify(b"build/.git", True) is CACHE
    assert rules.classify(b".ssh/x.tmp", False) is HOST
    assert rules.classify(b"build/home/.ssh", True) is HOST
    assert rules.classify(b"build/.codex/auth.json", False) is HOST


# Names of one inode


def test_combine() -> None:
    assert combine([]) is WORK
    assert combine([CACHE, CACHE]) is CACHE
    assert combine([CACHE, WORK]) is WORK
    assert combine([CACHE, JOURNAL]) is JOURNAL
    assert combine([CACHE, JOURNAL, WORK]) is JOURNAL
    assert combine([CACHE, JOURNAL, WORK, HOST]) is HOST


# Renames of directories


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("src/a", "src/b"),
        ("a", "b"),
        ("a", "x/y/z/a"),
        ("home/me/.claude/projects/x", "home/me/.claude/projects/y"),
        (".cache/uv/.tmpx", ".cache/uv/archive-v0/y"),
        ("go/pkg/mod/cache/tmp", "go/pkg/mod/x@v1"),
        (".ssh/a", ".ssh/b"),
        ("a", "a.jsonl"),
        ("a.jsonl", "b.jsonl.lock"),
        (".git/a", ".git/b"),
        (".tmp-clone", "project"),
        ("a", "\udcff"),
        ("a", "a"),
    ],
)
def test_an_ordinary_rename_needs_no_walk(old: str, new: str) -> None:
    assert not DEFAULT.may_change_below(*(name.encode("utf-8", "surrogateescape") for name in (old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a", "go"),
        ("go/pkg/x", "go/pkg/mod"),
        ("x", ".ssh"),
        (".config/gh", ".config/gh2"),
        (".cache/uv", "uv"),
        ("a/.git", "a/.git.old"),
        ("go/pkg/mod/a", "a"),
        (".codex", ".codex.bak"),
        ("", "a"),
    ],
)
def test_a_rename_that_may_change_a_class(old: str, new: str) -> None:
    assert DEFAULT.may_change_below(old.encode(), new.encode())
    assert DEFAULT.may_change_below(new.encode(), old.encode())


def test_a_rule_of_the_user_counts_too() -> None:
    rules = parse(("/a/build/", "cache"))
    assert rules.may_change_below(b"a", b"b")
    assert not rules.may_change_below(b"c", b"b")
    assert not rules.may_change_below(b"a/build/x", b"a/build/y")


# The document


def test_the_document_lists_the_defaults() -> None:
    text = (Path(__file__).parent.parent / "docs" / "classes.md").read_text(encoding="utf-8")
    for pattern in [*(each for _, group in DEFAULTS for each in group), *OPTION_PATTERNS.values()]:
        assert f"`{pattern}`" in text, f"docs/classes.md does not name {pattern}"
