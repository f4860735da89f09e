"""Build servesim. With a C compiler, mypyc compiles the engine, the costs and the policies from their Python files.

    SERVESIM_PURE=1     do not compile; another value is the reason that `sim --version` shows
    SERVESIM_COMPILE=1  fail if the modules cannot be compiled

Without these variables a failed build installs plain Python, and `sim --version` shows the reason.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MYPY = "mypy==2.4.1"
COMPILED = ("core/*", "engine/*", "costs/*", "policies/*", "policies/*/*", "routers/*", "runs/packed_requests")
INTERPRETED = (
    "__init__",
    "errors", "limits", "native",  # subclasses of built-in exceptions; rarely used; see its text
    "class_source", "fields",  # read annotations and source files, once per class
    # read mappings and files, once per run
    "device_profile", "mapping", "named_profile", "profile", "profile_file", "terms", "uncertainty",
    "config_file", "export", "tuning", "vllm_flags",  # configurations of engines, read and written
    "blake3", "exact_time",  # of keys; see its text
    "kv_memory", "model_arithmetic", "model_config", "profile_verdict",  # used at most once per run
)  # fmt: skip
# mypy must not follow imports to the packages that only other modules need.
MYPY_CONFIG = """[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-servesim.api,numpy.*,simpy.*]
follow_imports = skip
"""
REQUIRED = os.environ.get("SERVESIM_COMPILE", "") not in ("", "0")


def why_plain() -> str:
    """Return why the modules are not compiled, or an empty text if they are."""
    pure = os.environ.get("SERVESIM_PURE", "")
    if pure not in ("", "0"):
        return "SERVESIM_PURE was set" if pure == "1" else pure
    if sys.version_info < (3, 10):
        return "the compiler needs Python 3.10"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if sys.platform != "win32" and shutil.which(compiler) is None:
        return "no C compiler found"
    return ""


class CompiledDistribution(Distribution):
    """A wheel for one platform. The list of its extension modules is made during the build."""

    def has_ext_modules(self) -> bool:
        return True


class ParallelBuild(build_ext):
    """Runs one C compiler per core: all modules are files of one library, and setuptools compiles one after another."""

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        if compiler.compiler_type == "unix":
            compile_files = compiler.compile

            def compile_in_parallel(sources: list[str], **options: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return [objects[0] for objects in pool.map(lambda file: compile_files([file], **options), sources)]

            compiler.compile = compile_in_parallel
        super().build_extensions()


class BuildPlain(build_py):
    """Copies the Python files and writes why they are not compiled."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_note(Path(self.build_lib) / "servesim", why_plain())


class BuildCompiled(build_ext):
    """Compiles the Python files that `build_py` has copied, so that the names of modules follow from their paths."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            return  # a changed file must have an effect at once
        package, temp = Path(self.build_lib).resolve() / "servesim", Path(self.build_temp).resolve()
        try:
            self.compile(package, temp)
        except (Exception, SystemExit) as error:  # mypyc exits if it finds an error
            if REQUIRED:
                raise
            for file in package.parent.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
                file.unlink()
            print(f"servesim is not compiled: {error!r}", file=sys.stderr)
            write_note(package, "the build failed; SERVESIM_COMPILE=1 pip install . shows the error")

    def compile(self, package: Path, temp: Path) -> None:
        """Translate the modules to C and compile them."""
        from mypyc.build import mypycify

        temp.mkdir(parents=True, exist_ok=True)
        config = temp / "mypy.ini"
        config.write_text(MYPY_CONFIG, encoding="utf-8")
        folder = Path.cwd()
        os.chdir(package.parent)
        try:
            self.distribution.ext_modules = mypycify(
                ["--config-file", str(config), "--cache-dir", str(temp / "mypy_cache"), *compiled_files(package)],
                opt_level="2", debug_level="0", multi_file=True, group_name="servesim.compiled", target_dir=str(temp),
            )  # fmt: skip
            for module in self.distribution.ext_modules:
                module.include_dirs.append(str(temp / "servesim"))  # mypyc writes the headers of a dotted group there
                if sys.platform == "linux":  # calls go through no table; a*b+c is rounded as in plain Python
                    module.extra_compile_args += ["-fvisibility=hidden", "-fno-plt", "-ffp-contract=off"]
            build = ParallelBuild(self.distribution)
            build.build_lib, build.build_temp = str(package.parent), str(temp)
            build.ensure_finalized()
            build.run()
        finally:
            os.chdir(folder)


def compiled_files(package: Path) -> list[str]:
    """Return the files to compile, relative to the folder of the package."""
    files = [file for pattern in COMPILED for file in sorted(package.glob(f"{pattern}.py"))]
    return [str(file.relative_to(package.parent)) for file in files if file.stem not in INTERPRETED]


def packages() -> list[str]:
    """Return the packages: the folders with an `__init__.py`. The folder sim/ is the package `servesim` itself."""
    tops = ("sim", "policies", "routers", "calibrate", "traces")
    folders = [file.parent for top in tops for file in sorted(Path(top).rglob("__init__.py"))]
    return [".".join(("servesim", *folder.parts)).replace("servesim.sim", "servesim", 1) for folder in folders]


def write_note(package: Path, text: str) -> None:
    """Write why the installation is plain Python; `sim --version` shows it."""
    (package / "plain.txt").write_text(text + "\n", encoding="utf-8")


reason = why_plain()
if reason and REQUIRED:
    sys.exit(f"SERVESIM_COMPILE is set, but servesim cannot be compiled: {reason}")
if reason:
    setup(packages=packages(), cmdclass={"build_py": BuildPlain})
else:
    setup(
        packages=packages(),
        distclass=CompiledDistribution,
        cmdclass={"build_ext": BuildCompiled},
        setup_requires=[MYPY],
    )
