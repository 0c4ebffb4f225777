"""Which names of vLLM this package uses, and what became of them in another version.

    python patches/compatibility.py               the names, in the installed vLLM
    python patches/compatibility.py NEXT/vllm     and what that folder has of them

Names are those that are imported, with what is read of modules and classes; functions that are
replaced (`replace_function`); and methods of vLLM's classes that subclasses of ours override or
call. What other objects have is not seen. Sources are parsed and nothing is imported, so that an
unpacked wheel will do, of whatever platform.

The result is a table in Markdown; with a folder it has the names that differ. The status is 1 where
a name is missing, or its parameters are others: a function's, those that make a class, or its
fields; there may be more fields.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NamedTuple

OURS, ROOT = "vllm_recycle", Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MISSING, SAME = "**missing**", "same"


class Module:
    """A module's source, and what its names stand for.

    Attributes:
        defined: the statements at its top that bind a name.
        imported: full names of what it imports, wherever in it.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.tree = name, ast.parse(file.read_text(encoding="utf-8"))
        self.defined = dict(bindings(self.tree))
        self.imported: dict[str, str] = {}
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                source = resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{source}.{alias.name}"
            elif isinstance(node, ast.Import):
                self.imported |= {one.asname or one.name: one.name for one in node.names}

    def full_name(self, node: ast.expr) -> str:
        """What a dotted expression stands for, as far as it begins with a name of the module."""
        if isinstance(node, ast.Attribute):
            return f"{self.full_name(node.value)}.{node.attr}"
        name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
        return f"{self.name}.{name}" if name in self.defined else self.imported.get(name, name)


class Definition(NamedTuple):
    module: Module
    node: ast.AST  # a statement, or the tree of a whole module


class Sources:
    """The sources of vLLM in a folder, and ours: finds what a full name stands for."""

    def __init__(self, vllm: Path) -> None:
        self._folders = {"vllm": vllm, OURS: ROOT / OURS}
        self._modules: dict[str, Module | None] = {}

    @cached_property
    def version(self) -> str:
        file = self._folders["vllm"] / "_version.py"
        found = re.search(r"version = '(.+?)'", file.read_text()) if file.is_file() else None
        return found[1] if found else str(file.parent)

    def module(self, name: str) -> Module | None:
        """None where there is no such module."""
        if name not in self._modules:
            package, *parts = name.split(".")
            path = self._folders.get(package, ROOT / "none").joinpath(*parts)
            files = [path / "__init__.py", path.parent / f"{path.name}.py"]
            there = [file for file in files if file.is_file()]
            self._modules[name] = Module(name, there[0]) if there else None
        return self._modules[name]

    def find(self, name: str) -> Definition | None:
        """Where a full name is defined, through imports and base classes; None if nowhere."""
        if module := self.module(name):
            return Definition(module, module.tree)
        owner_name, _, last = name.rpartition(".")
        owner = self.find(owner_name) if owner_name else None
        if owner is None:
            return None
        if isinstance(owner.node, ast.Module):
            if last in owner.module.defined:
                return Definition(owner.module, owner.module.defined[last])
            imported = owner.module.imported.get(last, name)
            return self.find(imported) if imported != name else None
        for module, node in self.classes(owner):
            if found := dict(bindings(node)).get(last):
                return Definition(module, found)
        return None

    def classes(self, definition: Definition) -> Iterator[Definition]:
        """A class, then its bases and theirs."""
        if isinstance(definition.node, ast.ClassDef):
            yield definition
            for base in definition.node.bases:
                if found := self.find(definition.module.full_name(base)):
                    yield from self.classes(found)

    def parameters(self, name: str) -> list[str] | None:
        """What a function, or the making of a class, takes; None of what takes nothing."""
        definition = self.find(name)
        if definition is None or isinstance(definition.node, ast.Module):
            return None
        if isinstance(definition.node, FUNCTIONS):
            return parameters(definition.node.args)
        made = self.find(f"{name}.__init__") if isinstance(definition.node, ast.ClassDef) else None
        if made and isinstance(made.node, FUNCTIONS):
            return parameters(made.node.args)
        owners = self.classes(definition)
        fields = [field for _, node in owners for field, what in bindings(node) if is_field(what)]
        return list(dict.fromkeys(fields))


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that the statements of a module or a class bind, those below an `if` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield child.name, child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from bindings(child)


def parameters(args: ast.arguments) -> list[str]:
    """Names of parameters, with their defaults."""
    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults, *args.kw_defaults]
    named = zip([*positional, *args.kwonlyargs], defaults, strict=True)
    texts = [one.arg + (f"={ast.unparse(value)}" if value else "") for one, value in named]
    rest = [f"{stars}{one.arg}" for stars, one in (("*", args.vararg), ("**", args.kwarg)) if one]
    return texts + rest


def uses(sources: Sources, module: Module) -> Iterator[tuple[str, str]]:
    """Names of vLLM that a module of ours uses, each with how."""
    for name in module.imported.values():
        yield name, "imported"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = module.full_name(node)
            owner = sources.find(name.rpartition(".")[0])
            if owner and isinstance(owner.node, ast.Module | ast.ClassDef):
                yield name, "read"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replace_function":
            owner_node, name_node, _ = node.args
            if isinstance(name_node, ast.Constant):
                yield f"{module.full_name(owner_node)}.{name_node.value}", "replaced"
        elif isinstance(node, ast.ClassDef):
            yield from uses_of_bases(sources, Definition(module, node))


def uses_of_bases(sources: Sources, definition: Definition) -> Iterator[tuple[str, str]]:
    """What a class, and those of its bases that are ours, override and call of vLLM's bases."""
    ours = [one for one in sources.classes(definition) if one.module.name.startswith(OURS)]
    bases = [one.module.full_name(base) for one in ours for base in one.node.bases]  # type: ignore[attr-defined]
    used = set()
    for _, node in ours:
        used |= {
            (name, "overridden") for name, what in bindings(node) if isinstance(what, FUNCTIONS)
        }
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and ast.unparse(child.value) in ("self", "super()"):
                used.add((child.attr, "called"))
    for name, how in used:
        found = {base: sources.find(f"{base}.{name}") for base in bases if base.startswith("vllm.")}
        for base, method in found.items():
            if method and isinstance(method.node, FUNCTIONS):
                yield f"{base}.{name}", how


def used_names(sources: Sources) -> dict[str, dict[str, set[str]]]:
    """By name of vLLM: how it is used, and in which of our files."""
    names: dict[str, dict[str, set[str]]] = {}
    for file in sorted((ROOT / OURS).rglob("*.py")):
        relative = file.relative_to(ROOT).with_suffix("")
        module = sources.module(".".join(relative.parts).removesuffix(".__init__"))
        assert module is not None
        for name, how in uses(sources, module):
            # What every module and class has is defined nowhere.
            if name.startswith("vllm.") and not (how == "read" and name.endswith("__")):
                used = names.setdefault(name, {"how": set(), "where": set()})
                used["how"].add(how)
                used["where"].add(str(relative.relative_to(OURS)))
    return names


def compare(name: str, old: Sources, new: Sources) -> str:
    """What became of a name."""
    before, now = old.find(name), new.find(name)
    if before is None or now is None:
        return MISSING
    given, taken = old.parameters(name), new.parameters(name)
    if given != taken:
        gone = [f"-{one}" for one in given or () if one not in (taken or ())]
        more = [f"+{one}" for one in taken or () if one not in (given or ())]
        has_more_fields = more and not gone and isinstance(now.node, ast.ClassDef)
        what = (
            "more fields" if has_more_fields and not new.find(f"{name}.__init__") else "parameters"
        )
        return f"{what}: `{' '.join(gone + more) or 'in another order'}`"
    is_same = isinstance(now.node, ast.Module | ast.ClassDef) or code(before.node) == code(now.node)
    return SAME if is_same else "code differs"


def code(node: ast.AST) -> str:
    """What a statement does, without the docstring of a function."""
    body = [ast.dump(one) for one in ast.iter_child_nodes(node)]
    if isinstance(node, FUNCTIONS) and ast.get_docstring(node) is not None:
        body.remove(ast.dump(node.body[0]))
    return "\n".join(body)


def main(next_vllm: str | None = None) -> int:
    """Print the table; with a folder, of what differs there."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    old = Sources(Path(spec.origin).parent)
    new = Sources(Path(next_vllm)) if next_vllm else old
    if new.module("vllm") is None:
        print(f"no vllm in {next_vllm}, expected the folder of the package", file=sys.stderr)
        return 2
    names = used_names(old)
    said = {name: compare(name, old, new) for name in names}
    others = {name for name in names if said[name] != SAME}
    print(
        f"This package uses {len(names)} names of vllm {old.version}. In vllm {new.version} "
        f"{len(names) - len(others)} of them are the same.\n"
    )
    print(f"| name | how | in | {new.version} |\n| --- | --- | --- | --- |")
    for name, used in sorted(names.items()):
        if next_vllm and name not in others:
            continue
        how, where = (", ".join(sorted(used[key])) for key in ("how", "where"))
        print(f"| `{name.removeprefix('vllm.')}` | {how} | {where} | {said[name]} |")
    return int(any(what.startswith((MISSING, "parameters")) for what in said.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
