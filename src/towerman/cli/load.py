"""What the user names on the command line, read: a file of calls, a tower in a module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from towerman.cli.words import Wrong
from towerman.errors import InputError

if TYPE_CHECKING:
    from towerman.calls import Batch
    from towerman.tower import Tower


def read_bytes(name: str) -> bytes:
    """The bytes of a file, or of stdin for `-`.

    Args:
        name: a path, or `-`.

    Raises:
        Wrong: there is no such file, or it cannot be read.
    """
    if name == "-":
        if sys.stdin is None:
            raise Wrong("stdin: it is closed; give it a file or a pipe, or name a file")
        try:
            return sys.stdin.buffer.read()
        except OSError as error:
            raise Wrong(f"stdin: cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        return Path(name).read_bytes()
    except FileNotFoundError:
        raise Wrong(f"{name}: there is no such file") from None
    except OSError as error:
        raise Wrong(f"{name}: cannot be read: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL in the name
        raise Wrong(f"{name}: this is no file name") from None


def read_text(name: str) -> str:
    """The text of a file, or of stdin for `-`; a byte order mark is left out.

    Raises:
        Wrong: there is no such file, it cannot be read, or it is not UTF-8.
    """
    try:
        return read_bytes(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Wrong(f"{shown(name)}: not UTF-8 text (byte {error.start + 1})") from None


@dataclass(frozen=True, slots=True)
class Given:
    """What a file holds: calls, or a plan that is read with the tower's tools in view.

    Args:
        name: of the file.
        batch: the calls; None for a planner's plan.
        plan: the text of the plan.
        form: the form of the plan.
    """

    name: str
    batch: Batch | None = None
    plan: str = ""
    form: str = ""

    def for_tower(self, tower: Tower) -> Batch:
        """The batch that it is for this tower.

        Raises:
            Wrong: it is no plan in its form.
        """
        if self.batch is not None:
            return self.batch
        from towerman.forms import read_plan

        try:
            return read_plan(self.plan, self.form, tower._core.parameters_of)
        except InputError as problem:
            raise Wrong(f"{shown(self.name)}: {problem}") from None


def read_given(name: str, format: str | None) -> Given:
    """The calls or the plan in a file, or in stdin for `-`.

    Args:
        name: a path, or `-`.
        format: the form; None to find out.

    Raises:
        Wrong: it cannot be read, or is neither in that form; or there is no such form.
    """
    from towerman.adapters import FORMATS
    from towerman.forms import FORMS, find_form, is_form

    if format in FORMATS:
        return Given(name, read_batch(name, format))
    if format is not None and not is_form(format):
        known = ", ".join((*FORMATS, *FORMS))
        raise Wrong(f"--format {format[:32]!r}: no such form; known are {known}, and worfbench:TOOL")
    text = read_text(name)
    if format is None and text.strip():
        try:
            format = find_form(text)
        except InputError as problem:
            raise Wrong(f"{shown(name)}: {problem}") from None
        if format is None and text.lstrip()[:1] not in ("{", "["):
            raise Wrong(f"{shown(name)}: neither JSON nor a plan in a known form; --format says in which it is written")
    if format is None or format in FORMATS:
        return Given(name, _batch_of(name, text, None))
    return Given(name, plan=text, form=format)


def read_batch(name: str, format: str | None) -> Batch:
    """The calls in a file, or in stdin for `-`.

    Args:
        name: a path, or `-`.
        format: the form they have; None to find out.

    Raises:
        Wrong: it cannot be read, or is no batch of calls in that form.
    """
    return _batch_of(name, read_text(name), format)


def _batch_of(name: str, text: str, format: str | None) -> Batch:
    from towerman.adapters import decode

    if not text.strip():
        raise Wrong(f"{shown(name)}: it is empty; an empty batch is []")
    try:
        batch = decode(text, format)
        # An answer of one provider without calls can look like an answer of another that has some.
        other = decode(text) if format is not None and not batch.calls else batch
    except InputError as problem:
        raise Wrong(f"{shown(name)}: {problem}") from None
    if len(other.calls) > len(batch.calls):
        raise Wrong(f"{shown(name)}: no calls in it as {format}, but {len(other.calls)} as {other.format}")
    return batch


def shown(name: str) -> str:
    """How a file is called in messages."""
    return "stdin" if name == "-" else name


def load_tower(spec: str, config: Path | None = None) -> Tower:
    """The Tower that `module:tower` names.

    Args:
        spec: `module:name`, where the module is importable from the current folder or `sys.path`, or the path of a
            `.py` file; the name may have dots, and is `tower` when it is left out.
        config: the file that the tower is to read when it is made, where the code names none.

    Raises:
        Wrong: no such module, it fails while it is imported, or there is no Tower under that name; or the file is
            wrong, or was not read.
    """
    from towerman.config import FILE_VARIABLE, load
    from towerman.errors import PolicyError

    if config is None:
        return _load_tower(spec)
    try:
        load(config)
    except PolicyError as wrong:
        raise Wrong(f"--config: {wrong}") from None
    before = os.environ.get(FILE_VARIABLE)
    os.environ[FILE_VARIABLE] = str(config)
    try:
        tower = _load_tower(spec)
    finally:
        if before is None:
            del os.environ[FILE_VARIABLE]
        else:
            os.environ[FILE_VARIABLE] = before
    if tower.config != str(config):
        raise Wrong(
            f"--config {config}: not read, for the tower in {spec} has a config= of its own; leave one of them out"
        )
    return tower


def _load_tower(spec: str) -> Tower:
    from towerman.tower import Tower

    where, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "tower")
    if not where or not name:
        raise Wrong(f"--tools {spec}: write it as module:tower, for example my_tools:tower")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _import(spec, where)
    found: object = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            towers = [key for key, value in vars(module).items() if isinstance(value, Tower)]
            hint = f"it has {', '.join(towers)}" if towers else "and no Tower under another name either"
            raise Wrong(f"--tools {spec}: {where} has no {name!r}; {hint}") from None
    if not isinstance(found, Tower):
        kind = found.__name__ if isinstance(found, type) else type(found).__name__
        raise Wrong(f"--tools {spec}: {name!r} is not a Tower but {kind}; make one with tower = Tower()")
    return found


def _import(spec: str, where: str) -> ModuleType:
    try:
        if where.endswith(".py") or os.sep in where:
            return _import_file(spec, Path(where))
        importlib.invalidate_caches()
        return importlib.import_module(where)
    except Wrong:
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise Wrong(
                f"--tools {spec}: there is no module {error.name!r} in the current folder or on sys.path"
            ) from None
        raise Wrong(f"--tools {spec}: {where} needs the module {error.name!r}, which is not installed") from None
    except SystemExit:
        raise Wrong(f"--tools {spec}: {where} ends the program while it is imported") from None
    except Exception as error:
        raise Wrong(f"--tools {spec}: {where} fails while it is imported: {_told(error)}") from None


def _import_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise Wrong(f"--tools {spec}: there is no file {path}")
    loader = importlib.util.spec_from_file_location(path.stem, path)
    if loader is None or loader.loader is None:
        raise Wrong(f"--tools {spec}: {path} is no Python file")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(loader)
    # Pickling and dataclasses look a module up by its name.
    sys.modules[path.stem] = module
    loader.loader.exec_module(module)
    return module


def _told(error: Exception) -> str:
    """Type, text and line of an error in the user's module."""
    place = ""
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if not name.startswith("<frozen"):
            place = f" ({Path(name).name}, line {step.tb_lineno})"
        step = step.tb_next
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '?').name}, line {error.lineno})"
        return f"{type(error).__name__}: {error.msg}{place}"
    return f"{type(error).__name__}: {str(error)[:300]}{place}"
