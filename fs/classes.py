"""Rules → class: which promise a path is kept under.

A rule is a gitignore pattern and a class. All rules form one list — the built-in ones, those that an option switches
on, then the rule file's — and the *last* match wins; a path that nothing matches is work.

A pattern is kept as its path components, each a regex that cannot match a slash, with `**` between them where any
number of components may be. Everything follows from that one form. A cache, host or work rule that matches a directory
matches whatever is below it, so its regex may end at a slash. A journal rule speaks of files and must match the whole
path: a directory called `x.jsonl` makes no journals of what lies in it. Reading a directory's components leaves a set
of positions in the pattern; two paths that leave the same sets behind in every rule classify all descendants alike,
which is how the rename of a directory is known to need no walk.

Two things are never cache, whatever the rules say: `.git` unless it lies in a cache root (a directory that is itself
cache), and what the built-in host rules name. `Rules.parse` refuses a rule that asks for either, by name or wildcard;
`Rules.classify` holds to it for the rest, so that a rule `build/` does not reach the branch `.git/refs/heads/build/x`.

Patterns are the admin's, names are the agents': every regex here takes time linear in a path's length, and nothing
depends on `$` or on a dot that stops at a newline.
"""

import enum
import functools
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from deltapool.fs.errors import ConfigError

RULE_COUNT_MAX = 250
PATTERN_CHARACTERS_MAX = 1_000


class FileClass(enum.IntEnum):
    """Stored as its number in SQLite: the numbers are format."""

    WORK = 0
    JOURNAL = 1
    CACHE = 2
    HOST = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class RuleError(ConfigError, ValueError):
    """A rule file that is refused: ``<source>, line N: <what is wrong and what to do>``."""


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    file_class: FileClass
    source: str
    line: int


# What holds credentials, at any depth. A file that is known by its directory too is written with a final *, which
# takes the temporary names that it is replaced from. CLAUDE_CONFIG_DIR may not be called .claude.
HOST_PATTERNS = """
    .ssh/ .gnupg/ .aws/ .azure/ .kube/ **/.config/gcloud/ **/.local/share/keyrings/ .netrc .pypirc .pgpass .s3cfg
    .vault-token .git-credentials .git-credentials.lock .credentials.json .credentials.json.* **/.codex/auth.json*
    **/.pi/agent/auth.json* **/.qwen/oauth_creds.json* **/.gemini/oauth_creds.json* **/.gemini/mcp-oauth-tokens*
    **/.gemini/.env* **/.local/share/opencode/auth.json* **/.local/share/opencode/mcp-auth.json*
    **/.config/gptme/config*.toml* **/.config/io.datasette.llm/keys.json* **/.config/mini-swe-agent/.env*
    **/.config/git/credentials* **/.config/gh/hosts.yml* **/.config/glab-cli/config.yml* **/.config/hub
    **/.config/containers/auth.json* **/.docker/config.json* **/.config/rclone/rclone.conf* **/.cargo/credentials*
    **/.gem/credentials* **/.terraform.d/credentials.tfrc.json* **/.huggingface/token* **/.cache/huggingface/token*
    **/.cache/huggingface/stored_tokens*
""".split()
CACHE_PATTERNS = (
    "**/go/pkg/mod/ **/.cache/go-build/ **/.npm/_cacache/ **/.npm/_npx/ **/.cache/pip/ **/.cache/uv/".split()
)
DEFAULTS: tuple[tuple[FileClass, Sequence[str]], ...] = (
    (FileClass.JOURNAL, ("*.jsonl",)),
    # Emacs' lock links, and git's own files: a branch may be called x.jsonl, and a ref that is
    # shipped before the objects it names would be a broken repository on the next host.
    (FileClass.WORK, (".#*.jsonl", ".git/")),
    (FileClass.CACHE, CACHE_PATTERNS),
    (FileClass.HOST, HOST_PATTERNS),
)

OPTION_PATTERNS = {"node_modules": "node_modules/", "venv": ".venv/"}
OPTIONS = ("cachedir_tag", *OPTION_PATTERNS)

_PROBE = "deltapool-probe"  # a name that only a wildcard matches
_PROBES = f"""
    .git .git/ .git/HEAD .git/config .git/index .git/refs/heads/{_PROBE}
    .git/objects/4b/825dc642cb6eb9a060e54bf8d69288fbee .git/objects/pack/{_PROBE}.idx .git/objects/pack/{_PROBE}.pack
    .ssh/id_ed25519 .ssh/config .aws/credentials .kube/config .config/gcloud/credentials.db .claude/.credentials.json
""".split()

# What pathspec makes of a segment: an escaped character, a bracket (`*` is "[^/]*"), or a plain character.
_TOKEN = re.compile(r"\\.|\[\^?\]?[^\]]*\][*+]?|.", re.DOTALL)
_SEGMENT = re.compile(r"\^(.*)/x\(\?:\(\?P<ps_d>/\)\|\$\)", re.DOTALL)
_RULE_HEADER = re.compile(r"[ \t]*\[\[[ \t]*rule[ \t]*\]\]")

_Matcher = Callable[[str], re.Match[str] | None]
_BELOW = frozenset({-1})  # a position set: the rule matched, and matches whatever is below


@dataclass(frozen=True, slots=True)
class _Segment:
    """One component of a pattern. `sample` is a name that it matches."""

    regex: str
    sample: str
    matches: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Glob:
    """A rule, taken apart. None stands for `**` and is never the last segment nor next to another None."""

    rule: Rule
    segments: tuple[_Segment | None, ...]
    directories_only: bool

    def regex(self) -> tuple[bool, str]:
        """The regex of a path (with a slash at its end if a directory); True if `(?:.+/)?` is to precede it."""
        runs: list[str] = [""]
        for position, segment in enumerate(self.segments):
            if segment is None:
                runs.append("")
            else:
                runs[-1] += segment.regex + ("/" if position < len(self.segments) - 1 else "")
        is_journal = self.rule.file_class is FileClass.JOURNAL
        end = r"\Z" if is_journal else "/" if self.directories_only else r"(?:/|\Z)"
        if len(runs) == 2 and not runs[0]:
            return True, runs[1] + end
        # The first place where a run fits is as good as any later one: no backtracking into a run.
        middle = "".join(rf"(?>(?:[^/]+/)*?{run})" for run in runs[1:-1])
        return False, runs[0] + middle + (f"(?:.+/)?{runs[-1]}" if len(runs) > 1 else "") + end

    def below(self, directories: Sequence[str]) -> frozenset[int]:
        """The positions in the pattern that are left for what is below these directories."""
        positions = self._after({0})
        for name in directories:
            reached = {
                at if segment is None else at + 1
                for at in positions
                if (segment := self.segments[at]) is None or segment.matches(name)
            }
            if len(self.segments) in reached:
                if self.rule.file_class is not FileClass.JOURNAL:
                    return _BELOW
                reached.remove(len(self.segments))
            positions = self._after(reached)
        return positions

    def _after(self, reached: set[int]) -> frozenset[int]:
        # `**` may stand for nothing.
        return frozenset(reached.union(at + 1 for at in reached if self.segments[at] is None))


def combine(classes: Iterable[FileClass]) -> FileClass:
    """The class of an inode, over all its names. Unknown is work, and so is an inode without a name."""
    seen = frozenset(classes)
    if FileClass.HOST in seen:
        return FileClass.HOST
    if seen == {FileClass.CACHE}:
        return FileClass.CACHE
    return FileClass.JOURNAL if FileClass.JOURNAL in seen else FileClass.WORK


class Rules:
    """An immutable list of rules, ready to classify."""

    __slots__ = ("_directory_groups", "_file_groups", "_globs", "cachedir_tag", "rules")

    def __init__(self, rules: Iterable[Rule] = (), cachedir_tag: bool = False) -> None:
        """The built-in rules, then these, unchecked: see `parse`. Raises RuleError for a bad pattern."""
        self.rules = (*_default_rules(), *rules)
        self.cachedir_tag = cachedir_tag
        self._globs = tuple(_compile(rule) for rule in self.rules)
        self._file_groups = _groups(self._globs)
        self._directory_groups = _groups(glob for glob in self._globs if glob.rule.file_class is not FileClass.JOURNAL)

    @classmethod
    def defaults(cls) -> "Rules":
        return cls()

    @classmethod
    def parse(cls, text: str, source: str) -> "Rules":
        """The built-in rules, those that the options of this TOML switch on, then its own. Raises RuleError."""
        cachedir_tag, switched_on, own = _read(text, source)
        rules = cls([*switched_on, *own], cachedir_tag)
        rules._refuse_unsafe(rules._globs[len(rules._globs) - len(own) :])
        return rules

    def classify(self, path: bytes, is_dir: bool, tagged: bool = False) -> FileClass:
        """The class of a path, relative to the volume's root and without a slash at either end; b"" is the root.

        `tagged`: a directory above the path, or the path itself, holds a valid CACHEDIR.TAG. It makes cache of all but
        host files and what has `.git` in its path (the tag may be inside). Never raises, for any bytes.
        """
        if not path:
            return FileClass.WORK
        name = path.decode("utf-8", "surrogateescape")
        if is_dir:
            name += "/"
        verdict = self._verdict(name)
        if tagged or verdict is FileClass.CACHE:
            return self._guarded(name, verdict, tagged)
        return verdict

    def may_change_below(self, old: bytes, new: bytes) -> bool:
        """Whether renaming directory `old` to `new` may change the class of any descendant, existing or not.

        False is certain, for either value of `tagged` that is the same before and after. True is a maybe.
        """
        if not old or not new:
            return old != new
        before, after = (path.decode("utf-8", "surrogateescape").split("/") for path in (old, new))
        if any(glob.below(before) != glob.below(after) for glob in self._globs):
            return True
        # Beyond the rules' positions, all that the protection of `.git` below these directories depends on.
        git = [(".git" in names, self._git_in_cache(names), self._in_cache(names)) for names in (before, after)]
        return git[0] != git[1]

    def _verdict(self, name: str) -> FileClass:
        """What the rules alone say of a directory (with a slash at its end) or a file."""
        for matches, file_class in self._directory_groups if name[-1] == "/" else self._file_groups:
            if matches(name):
                return file_class
        return FileClass.WORK

    def _guarded(self, name: str, verdict: FileClass, tagged: bool) -> FileClass:
        components = name.removesuffix("/").split("/")
        if tagged and verdict is not FileClass.HOST and ".git" not in components:
            verdict = FileClass.CACHE
        if verdict is not FileClass.CACHE:
            return verdict
        if _default_host()(name):
            return FileClass.HOST
        return FileClass.CACHE if self._git_in_cache(components) else FileClass.WORK

    def _in_cache(self, components: Sequence[str]) -> bool:
        return bool(components) and self._verdict("/".join(components) + "/") is FileClass.CACHE

    def _git_in_cache(self, components: Sequence[str]) -> bool:
        """Whether every `.git` in the path lies in a cache root (true if there is none)."""
        return all(self._in_cache(components[:at]) for at, name in enumerate(components) if name == ".git")

    def _refuse_unsafe(self, own: Sequence[_Glob]) -> None:
        for name in _probes([glob for glob in own if glob.rule.file_class is FileClass.CACHE]):
            if self._verdict(name) is not FileClass.CACHE:
                continue
            components = name.removesuffix("/").split("/")
            at, wanted = _protected(components)
            if at is None or any(self._in_cache(components[:count]) for count in range(at + 1)):
                continue
            glob = next((glob for glob in reversed(own) if _matcher([glob])(name)), None)
            if glob is not None:
                what = (
                    f"match = {glob.rule.pattern!r} would make {name} cache, which may be thrown away. Narrow it (name "
                    f"whole directories, with a slash at the end), or give this path class = {wanted.label!r} later."
                )
                raise _error(glob.rule.source, glob.rule.line, what)


def _protected(components: Sequence[str]) -> tuple[int | None, FileClass]:
    """Where a path enters `.git` or a built-in host file, and the class that it should have."""
    for at, component in enumerate(components):
        if component == ".git":
            return at, FileClass.WORK
        # With a slash it matches whatever the pattern is, a file's or a directory's.
        if _default_host()("/".join(components[: at + 1]) + "/"):
            return at, FileClass.HOST
    return None, FileClass.WORK


def _probes(globs: Sequence[_Glob]) -> Iterator[str]:
    """Paths that these rules do reach, and protected ones that they might. Directories end in a slash."""
    above = ["", f"{_PROBE}/", f"{_PROBE}/" * 4]
    for glob in globs:
        names = [segment.sample + "/" for segment in glob.segments if segment is not None]
        above += ["".join(names[:count]) for count in range(1, len(names))]
        path = "".join(names)
        yield from (path, path + _PROBE, *([] if glob.directories_only else [path.removesuffix("/")]))
    hosts = [pattern.removeprefix("**/").replace("*", "") for pattern in HOST_PATTERNS]
    below = [*_PROBES, *(path + _PROBE if path.endswith("/") else path for path in hosts)]
    if globs:
        yield from (directory + path for directory in dict.fromkeys(above) for path in below)


@functools.cache
def _default_rules() -> tuple[Rule, ...]:
    pairs = [(pattern, file_class) for file_class, patterns in DEFAULTS for pattern in patterns]
    return tuple(Rule(pattern, file_class, "built-in", at) for at, (pattern, file_class) in enumerate(pairs, 1))


@functools.cache
def _default_host() -> _Matcher:
    return _matcher([_compile(rule) for rule in _default_rules() if rule.file_class is FileClass.HOST])


def _groups(globs: Iterable[_Glob]) -> tuple[tuple[_Matcher, FileClass], ...]:
    """Last rule first; neighbours of one class are one regex."""
    runs = [(list(run), file_class) for file_class, run in itertools.groupby(globs, lambda glob: glob.rule.file_class)]
    return tuple((_matcher(run), file_class) for run, file_class in reversed(runs))


def _matcher(globs: Iterable[_Glob]) -> _Matcher:
    regexes = [glob.regex() for glob in globs]
    floating = "|".join(regex for is_floating, regex in regexes if is_floating)
    choices = [regex for is_floating, regex in regexes if not is_floating]
    if floating:
        choices.append(f"(?:.+/)?(?:{floating})")
    return re.compile("|".join(choices), re.DOTALL).match


def _compile(rule: Rule) -> _Glob:
    try:
        return _glob(rule)
    except ValueError as error:
        raise _error(rule.source, rule.line, f"match = {rule.pattern!r}: {error}") from None


def _glob(rule: Rule) -> _Glob:
    pattern = rule.pattern
    if not pattern.strip("/"):
        raise ValueError('it names nothing; write match = "*" for every path.')
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise ValueError(f"it is longer than {PATTERN_CHARACTERS_MAX} characters; shorten it.")
    if pattern.startswith("!"):
        raise ValueError("negation is not supported; write a later rule with class = ... instead (or \\! for a !).")
    if pattern.startswith("#"):
        raise ValueError("gitignore reads this as a comment; write \\# for a #.")
    if pattern != pattern.rstrip() and not pattern.endswith("\\ "):
        raise ValueError("it ends in white space; remove that, or write a backslash before a space that is meant.")
    directories_only = pattern.endswith("/")
    if directories_only and rule.file_class is FileClass.JOURNAL:
        raise ValueError("a journal is a file; remove the slash at the end, or write /** there for all files below.")
    names = pattern.removesuffix("/").split("/")
    if names[0] == "":
        del names[0]
    elif len(names) == 1:
        names.insert(0, "**")
    if names[-1] == "**":
        names.append("*")  # everything below, but not the directory itself
    segments: list[_Segment | None] = []
    for name in names:
        if name in ("", ".", ".."):
            raise ValueError("an empty component, . or .. matches nothing; remove it.")
        if name != "**":
            segments.append(_segment(name))
        elif not segments or segments[-1] is not None:
            segments.append(None)
    return _Glob(rule, tuple(segments), directories_only)


@functools.cache
def _segment(glob: str) -> _Segment:
    """Translate one component. pathspec reads it, so that escapes and brackets are git's."""
    try:
        regex, _ = GitIgnoreSpecPattern.pattern_to_regex(f"/{glob}/x")
    except ValueError:
        raise ValueError("a backslash with nothing to escape; write \\\\ for a backslash.") from None
    if regex is None:
        raise ValueError("a [ is not closed within its component; write \\[ for a [.")
    found = _SEGMENT.fullmatch(regex)
    assert found, f"pathspec translates differently than was assumed: {regex!r}"
    parts, sample = [""], ""
    for token in _TOKEN.findall(found[1]):
        if token == "[^/]*":
            parts.append("")
        elif token in ("[^/]", "[^/]+"):
            parts[-1] += token
            sample += "x"
        elif token.startswith("["):
            bracket, example = _bracket(token)
            parts[-1] += bracket
            sample += example
        else:
            parts[-1] += token
            sample += token[-1]
    if "" in parts[1:-1]:
        raise ValueError("** stands alone between slashes; within a component write *.")
    translated = parts[0] + "".join(f"(?>[^/]*?{part})" for part in parts[1:-1])
    if len(parts) > 1:
        translated += f"[^/]*{parts[-1]}"
    if translated == re.escape(sample):
        return _Segment(translated, sample, sample.__eq__)
    return _Segment(translated, sample, re.compile(translated, re.DOTALL).fullmatch)


def _bracket(token: str) -> tuple[str, str]:
    """The bracket, without what git and Python read differently and never matching a slash, and an example."""
    if re.search(r"\\|--|\[[:.=]", token[1:-1]):
        raise ValueError("in [ ] write single characters and ranges such as a-z only: no backslash, -- or [:name:].")
    regex = "(?!/)[" + re.sub(r"[\[&~|]", r"\\\g<0>", token[1:-1]) + "]"
    try:
        matches = re.compile(regex).match
    except re.error:
        raise ValueError("a range in [ ] runs backwards; write it as a-z.") from None
    return regex, next((chr(code) for code in range(33, 256) if matches(chr(code))), "x")


def _error(source: str, line: int, message: str) -> RuleError:
    return RuleError(f"{source}, line {line}: {message}")


def _read(text: str, source: str) -> tuple[bool, list[Rule], list[Rule]]:
    """The option cachedir_tag, the rules of the other options, and the rules. [limits] is another module's."""
    lines = text.split("\n")

    def line_of(key: str) -> int:  # tomllib does not tell
        header = re.compile(rf"[ \t]*(?:\[+[ \t]*)?[\"']?{re.escape(key)}[\"']?[ \t]*[].=]")
        return next((number for number, line in enumerate(lines, 1) if header.match(line)), 1)

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r"at line (\d+), column \d+\)$", str(error))
        number = int(at[1]) if at else len(lines) if "end of document" in str(error) else 1
        raise _error(source, number, f"this is not TOML: {error}. Correct the syntax.") from None
    for key in sorted(document.keys() - {"fuse", "limits", "options", "rule"}):
        raise _error(source, line_of(key), f"unknown key {key!r}; write [[rule]], [options], [limits] or [fuse].")
    options = document.get("options", {})
    for name, value in options.items() if isinstance(options, dict) else [("options", options)]:
        if name not in OPTIONS or not isinstance(value, bool):
            raise _error(source, line_of(name), f"[options] takes {', '.join(OPTIONS)}, each true or false.")
    on = [name for name in OPTION_PATTERNS if options.get(name, False)]
    switched_on = [Rule(OPTION_PATTERNS[name], FileClass.CACHE, source, line_of(name)) for name in on]
    headers = [number for number, line in enumerate(lines, 1) if _RULE_HEADER.match(line)]
    entries = document.get("rule", [])
    is_plain = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_plain or len(entries) != len(headers):
        raise _error(source, line_of("rule"), "begin each rule with a line [[rule]]: no other form, no text like it.")
    if len(entries) > RULE_COUNT_MAX:
        raise _error(source, headers[RULE_COUNT_MAX], f"more than {RULE_COUNT_MAX} rules; merge some into wider ones.")
    own = [_rule(entry, source, line) for entry, line in zip(entries, headers, strict=True)]
    return options.get("cachedir_tag", False), switched_on, own


def _rule(entry: dict[str, object], source: str, line: int) -> Rule:
    for key in sorted(entry.keys() - {"match", "class"}):
        raise _error(source, line, f"unknown key {key!r}; a rule has match and class.")
    pattern, label = entry.get("match"), entry.get("class")
    if not isinstance(pattern, str):
        raise _error(source, line, 'a rule needs match = "<gitignore pattern>".')
    classes = {file_class.label: file_class for file_class in FileClass}
    if not isinstance(label, str) or label not in classes:
        raise _error(source, line, f'a rule needs class = "journal", "work", "cache" or "host", not {label!r}.')
    return Rule(pattern, classes[label], source, line)
