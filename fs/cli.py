"""The command line: arguments in, exit codes and text out. What a command does is done elsewhere, in modules
that are imported when it runs: a command starts fast.

Exit codes: 0 done; 1 the answer is "no" (fsck found something) or it could not be done; 2 the arguments are wrong.
"""

import json
import pathlib
import sys
from typing import Annotated

import typer

from deltapool.fs import control, state, unmount
from deltapool.fs.errors import UserError

ANSWER_SECONDS = 60.0
END_SECONDS = 120.0
DETACHED_SECONDS = 2.0  # a detached mount ends when its users let go: that is not waited for

app = typer.Typer(
    name="deltapool",
    help="A filesystem for agents' workspaces: journals cost their delta, a crash loses nothing that was promised.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
Directory = Annotated[pathlib.Path, typer.Argument(help="Where the volume is mounted.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def main() -> None:
    """The entry point. A UserError becomes one line on stderr and exit code 1."""
    try:
        app(prog_name="deltapool")
    except UserError as error:
        print(f"deltapool: {error}", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"deltapool {importlib.metadata.version('deltapool')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: deltapool mount ~/workspace --config rules.toml")
def mount(
    directory: Directory,
    state_folder: Annotated[
        pathlib.Path | None,
        typer.Option("--state", metavar="DIR", help="The state folder. Default: $XDG_STATE_HOME/deltapool/<volume>."),
    ] = None,
    volume: Annotated[
        str | None, typer.Option(metavar="NAME", help="The volume's name. Default: made from DIR.")
    ] = None,
    config: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Limits and class rules, in TOML.")
    ] = None,
    foreground: Annotated[bool, typer.Option(help="Stay in the foreground and log to stderr.")] = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Mount a volume at DIR. Returns when it answers, or says why it cannot."""
    from deltapool.fs import launch

    request = launch.Request.make(directory, state_folder, volume, config)
    if foreground or ready_fd is not None:
        launch.in_foreground(request, ready_fd)
    else:
        launch.in_background(request)


@app.command(epilog="Example: deltapool umount ~/workspace")
def umount(
    directory: Directory,
    force: Annotated[bool, typer.Option(help="Detach a busy mount; it is served until its users let go.")] = False,
) -> None:
    """Unmount cleanly: nothing that was written is lost. A busy mount names who is using it."""
    mounted = _mounted(directory)
    pid = state.holder(mounted.state)
    detached = unmount.unmount(mounted, force=force)
    if pid and not unmount.wait_for_end(pid, DETACHED_SECONDS if detached else END_SECONDS):
        if not detached:
            raise UserError(f"{directory} is unmounted, but pid {pid} is still making it durable: wait for its end")
        print(f"deltapool: {directory} is detached; pid {pid} serves it until its users let go", file=sys.stderr)


@app.command(epilog="Example: deltapool status ~/workspace --json | jq .journals")
def status(directory: Directory, as_json: AsJson = False) -> None:
    """What is mounted, what it holds, what is dirty, and what agents wrote."""
    answer = control.call(_mounted(directory).state, "status", ANSWER_SECONDS)
    if as_json:
        print(json.dumps(answer))
        return
    from deltapool.fs import show

    show.status(answer)


@app.command(epilog="Example: deltapool journals ~/workspace")
def journals(directory: Directory, as_json: AsJson = False) -> None:
    """Every journal, without opening it."""
    answer = control.call(_mounted(directory).state, "journals", ANSWER_SECONDS)
    if as_json:
        print(json.dumps(answer))
        return
    from deltapool.fs import show

    show.journals(answer["journals"])


@app.command(
    epilog="Example: deltapool fsck ~/workspace, or deltapool fsck --state ~/.local/state/deltapool/work-1a2b3c4d"
)
def fsck(
    directory: Annotated[
        pathlib.Path | None, typer.Argument(help="Where the volume is mounted.", metavar="[DIR]")
    ] = None,
    state_folder: Annotated[
        pathlib.Path | None,
        typer.Option("--state", metavar="DIR", help="The state folder of a volume, mounted or not."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the namespace with the live files. Changes nothing; exit 1 with a list if anything is wrong."""
    from deltapool.fs import fsck as check
    from deltapool.fs import show

    if (directory is None) == (state_folder is None):
        raise typer.BadParameter("give DIR or --state")
    folder = state_folder if state_folder is not None else _mounted(directory).state  # type: ignore[arg-type]
    result = check.check(folder)
    if as_json:
        wrong = [each.as_dict() for each in result.findings]
        print(
            json.dumps({"inodes": result.inodes, "bytes": result.bytes, "in_flight": result.in_flight, "wrong": wrong})
        )
    else:
        for finding in result.findings:
            print(show.printable(str(finding)))
        print(f"{result.inodes} inodes, {result.bytes} bytes: {len(result.findings) or 'nothing'} wrong")
        if result.in_flight:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(result.in_flight.items()))
            print(f"in flight, and not compared: {counts}")
    if result.findings:
        raise typer.Exit(1)


def _mounted(directory: pathlib.Path) -> unmount.Mounted:
    found = unmount.mounted_at(directory)
    if found is None:
        raise UserError(f"nothing of deltapool is mounted at {directory}")
    return found


if __name__ == "__main__":
    main()
