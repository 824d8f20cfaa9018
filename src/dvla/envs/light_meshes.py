"""Light visual meshes: robots drawn with a few thousand triangles instead of a few hundred thousand.

A software rasteriser spends its time on vertices, not on pixels: with the meshes as shipped, a picture of
64 by 64 pixels costs as much as one of 256 by 256. Only what is drawn is replaced. Collision shapes, inertias
and joints are read from the original files, so the simulation is the same to the bit.

`light_visuals` is ManiSkill's entry: while it is active, SAPIEN's builders receive the light copy of each heavy
mesh. (LIBERO's is `dvla.envs.libero_meshes`.) Copies are made once per machine by `cached_copy` and kept in a cache
folder, under a name that depends on the content of the source file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dvla.envs.errors import EnvironmentSetupError

if TYPE_CHECKING:
    import trimesh

MIN_BYTES = 65_536
"""Smaller mesh files are left alone: they hold a thousand triangles or so."""
KEPT_SHARE = 0.06
"""Share of a file's triangles that is kept, within the two limits below."""
MIN_FACES = 400
"""Below this the outline of a robot link changes visibly."""
MAX_FACES = 2_000
"""Above this a single link costs more than it shows."""
CREASE = 0.5
"""Edges sharper than this, in radians, stay edges; softer ones are shaded as a smooth surface."""
SUFFIXES = (".glb", ".stl")
"""Formats that keep everything in one file, so that a hash of that file says all."""
FORMAT = 1
"""Raise it when the way of making a light mesh changes: old copies are then no longer found."""


def cache_folder() -> Path:
    """Return the folder of the light meshes: in $DVLA_CACHE_DIR, else in the user's cache folder."""
    if own := os.environ.get("DVLA_CACHE_DIR"):
        return Path(own) / "meshes"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dvla" / "meshes"


@contextlib.contextmanager
def light_visuals() -> Iterator[None]:
    """Give SAPIEN's builders light meshes while the block runs.

    It replaces one method of SAPIEN for the time of the block, since SAPIEN has no hook for it: use it in
    one thread only, around the creation of a simulator, and around resets, when some tasks build their scene
    anew.
    """
    from sapien.wrapper.actor_builder import ActorBuilder

    original = ActorBuilder.add_visual_from_file

    def add_visual_from_file(self: ActorBuilder, filename: str, *args: Any, **kwargs: Any) -> ActorBuilder:
        return original(self, str(light_mesh(Path(filename))), *args, **kwargs)

    ActorBuilder.add_visual_from_file = add_visual_from_file
    try:
        yield
    finally:
        ActorBuilder.add_visual_from_file = original


def light_mesh(source: Path) -> Path:
    """Return the light copy of a mesh file, or the file itself where there is nothing to gain.

    Raises:
        EnvironmentSetupError: The copy has to be made and the cache folder cannot be written.
    """
    if source.suffix.lower() not in SUFFIXES or not source.is_file():
        return source
    if source.stat().st_size < MIN_BYTES:
        return source
    return cached_copy(source, source.suffix.lower(), (FORMAT, KEPT_SHARE, MIN_FACES, MAX_FACES, CREASE), _make)


def cached_copy(source: Path, suffix: str, recipe: tuple[object, ...], make: Callable[[Path], bytes | None]) -> Path:
    """Return the copy of a file that `make` makes, or the file itself where `make` returns None.

    Args:
        source: The file.
        suffix: Ending of the copy's name, the dot included.
        recipe: Everything else that the copy depends on; the versions of the tools need not be named.
        make: Gives the content of the copy; called once per machine, not once per process.

    Raises:
        EnvironmentSetupError: The copy has to be made and the cache folder cannot be written.
    """
    status = source.stat()
    return _cached_copy(source, suffix, recipe, make, status.st_size, status.st_mtime_ns, cache_folder())


@functools.cache
def _cached_copy(
    source: Path,
    suffix: str,
    recipe: tuple[object, ...],
    make: Callable[[Path], bytes | None],
    size: int,
    mtime_ns: int,
    folder: Path,
) -> Path:
    """Find or make the copy; size and time serve as the memo's key, so a changed file is read again."""
    target = folder / f"{source.stem}-{_key(source, recipe)}{suffix}"
    unchanged = target.with_suffix(".unchanged")  # says that this mesh is best left as it is
    try:
        if not target.exists() and not unchanged.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # All workers of a machine start at once: the first makes the copy, the others wait for it.
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists() and not unchanged.exists():
                    content = make(source)
                    if content is None:
                        unchanged.touch()
                    else:
                        partial = target.with_suffix(f".{os.getpid()}.partial")
                        partial.write_bytes(content)
                        partial.replace(target)  # atomic: a reader sees no file or a whole one
    except OSError as error:
        raise EnvironmentSetupError(
            f"cannot keep light meshes in {folder}: {error}. Set DVLA_CACHE_DIR to a folder that can be "
            "written, or use the simulator's own meshes (meshes=full; several times slower without a GPU)"
        ) from error
    return source if unchanged.exists() else target


def _key(source: Path, recipe: tuple[object, ...]) -> str:
    """Hash everything a copy depends on: the source, the recipe and the tools' versions."""
    tools = [importlib.metadata.version(name) for name in ("trimesh", "fast-simplification")]
    digest = hashlib.sha256(repr((recipe, tools)).encode())
    digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _make(source: Path) -> bytes | None:
    """Return the content of the light copy of a .glb or .stl, None if there is nothing to gain."""
    import trimesh

    scene = trimesh.load_scene(source, process=False)
    meshes = scene.geometry
    total = sum(len(mesh.faces) for mesh in meshes.values())
    wanted = min(max(KEPT_SHARE * total, MIN_FACES), MAX_FACES)
    if wanted >= total or any(_is_textured(mesh) for mesh in meshes.values()):
        return None
    for name, mesh in meshes.items():
        meshes[name] = _decimate(mesh, wanted / total)
    # Left to itself, the loader would shade every vertex as smooth, creases included. STL has no such choice.
    options = {"include_normals": True} if source.suffix.lower() == ".glb" else {}
    return scene.export(file_type=source.suffix.lower()[1:], **options)


def _is_textured(mesh: trimesh.Trimesh) -> bool:
    """Whether the mesh carries a picture, whose coordinates decimation would lose."""
    material = getattr(mesh.visual, "material", None)
    return any(getattr(material, slot, None) is not None for slot in ("baseColorTexture", "image"))


def _decimate(mesh: trimesh.Trimesh, share: float) -> trimesh.Trimesh:
    """Reduce a mesh to `share` of its triangles by quadric decimation; its material is kept."""
    from trimesh.graph import smooth_shade
    from trimesh.visual import TextureVisuals

    material = getattr(mesh.visual, "material", None)
    light = mesh.copy()
    # Exporters split vertices along every edge; decimation would tear the surface apart there.
    light.merge_vertices(merge_tex=True, merge_norm=True)
    faces = max(round(share * len(mesh.faces)), 8)
    if faces < len(light.faces):
        light = light.simplify_quadric_decimation(face_count=faces)
    light = smooth_shade(light, angle=CREASE)
    if material is not None:
        light.visual = TextureVisuals(material=material)
    return light
