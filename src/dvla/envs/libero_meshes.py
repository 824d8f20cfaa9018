"""Light visual meshes for LIBERO: scenes drawn with 35,000 triangles instead of 290,000.

`light_scene` takes the XML of a scene and gives one in which geoms that are only seen (group 1, no collisions) use
decimated copies of their meshes. LIBERO takes inertia from group 0 alone, and meshes that take part in collisions keep
their files, so the simulation is the same to the bit.

Decimation works on the bare surface, with its seams merged, or it would tear there. What the corners of triangles
carry, normals and texture coordinates, is then read off the original surface: for each new triangle the part of the
original that it lies on (a part ends at creases, or at the seams of the texture), and within this part the values at
its three corners. So creases and the seams of textures stay where they were, within the size of a triangle.
"""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dvla.envs.light_meshes import cached_copy

FORMAT = 2
"""Raise it when the way of making a light mesh changes."""
KEPT_SHARE = 0.06
"""Share of a mesh's triangles that is kept, but no fewer than the next two say."""
MIN_FACES = 600
MIN_FACES_TEXTURED = 1_500
"""Textured things, a plate or a bowl, fill much of the wrist camera's picture, and its texture bends with them."""
SMALL = 0.06
"""Metres. For what is smaller, the screws of a robot, the least numbers shrink in proportion."""
ROOM = 2.0
"""Metres. What is larger is a room, with patches of colour in flat walls, which decimation, blind to colour, would
smear: the borders of those with a share of `PATCH` of its area stay as they are."""
PATCH = 0.01
UNITS = 5.0
"""Extent that meshes are scaled to for decimation, whose steps are absolute lengths: when larger they are finer."""
SOUP = 0.1
"""Share of edges with one triangle only, from which on a mesh is loose panels. These decimate badly unless merged
within `SOUP_MERGE` of their extent."""
SOUP_MERGE = 3e-3
ROUGH = 0.3
"""Mean angle at edges, in radians, from which on a surface is rough, like wicker: `FINE_SHARE` of it is kept."""
FINE_SHARE = 0.15
MERGE = 2e-5
"""Vertices closer than this share of a mesh's extent are one."""
NUDGE = 0.25
"""How far a corner moves to the centre of its triangle before the normal is read, so as not to read a bevel's."""


def light_scene(xml: str) -> str:
    """Return the XML of a MuJoCo scene with light visual meshes; all files must have absolute paths.

    Raises:
        EnvironmentSetupError: The cache folder cannot be written.
    """
    root = ET.fromstring(xml)
    textured = {material.get("name") for material in root.iter("material") if "texture" in material.attrib}
    seen: dict[str | None, bool] = {}
    touched: set[str | None] = set()
    for geom in root.iter("geom"):
        name = geom.get("mesh")
        if geom.get("group") == "1" and geom.get("contype") == "0" and geom.get("conaffinity") == "0":
            seen[name] = seen.get(name, False) or geom.get("material") in textured
        else:
            touched.add(name)
    for mesh in root.iter("mesh"):
        name = mesh.get("name")
        if name in seen and name not in touched and "file" in mesh.attrib:
            scale = max(float(factor) for factor in mesh.get("scale", "1").split())
            make = _maker(scale, seen[name])
            limits = (KEPT_SHARE, MIN_FACES, MIN_FACES_TEXTURED, SMALL, ROOM, PATCH)
            recipe = (FORMAT, scale, seen[name], *limits, UNITS, SOUP, SOUP_MERGE, ROUGH, FINE_SHARE, MERGE, NUDGE)
            mesh.set("file", str(cached_copy(Path(mesh.attrib["file"]), ".msh", recipe, make)))
    return ET.tostring(root, encoding="unicode")


@functools.cache
def _maker(scale: float, textured: bool) -> Callable[[Path], bytes | None]:
    return functools.partial(_make, scale=scale, textured=textured)


def _make(source: Path, scale: float, textured: bool) -> bytes | None:
    """Return a light copy as a .msh file, None if there is nothing to gain; `scale` turns the file's units to metres."""
    import fast_simplification

    vertices, faces, normals, texcoords = _load(source)
    if not textured:
        texcoords = None
    extent = float(np.ptp(vertices, axis=0).max())
    least = (MIN_FACES if texcoords is None else MIN_FACES_TEXTURED) * min(1.0, scale * extent / SMALL)
    first, merged = _merge(vertices, faces, MERGE * extent)
    edges, angles = _edges(vertices[first][merged], merged)
    share = KEPT_SHARE if angles.mean() < ROUGH else FINE_SHARE
    wanted = round(max(share * len(faces), least))
    if wanted > 0.7 * len(faces):
        return None
    if texcoords is None and (np.unique(edges, axis=0, return_counts=True)[1] == 1).mean() > SOUP:
        first, merged = _merge(vertices, faces, SOUP_MERGE * extent)
    proper = (merged != np.roll(merged, 1, axis=1)).all(axis=1)
    merged = merged[proper]
    keys = merged.reshape(-1, 1)
    room = scale * extent > ROOM
    if room and texcoords is not None:  # split vertices, so that large patches of the texture end at open borders
        patches = _parts(merged, texcoords[proper])
        areas = _areas(vertices[first][merged])
        large = np.bincount(patches, areas) > PATCH * areas.sum()
        keys = np.column_stack([keys, np.repeat(np.where(large[patches], patches, -1), 3)])
    keys, corners = np.unique(keys, axis=0, return_inverse=True)
    points, corners = fast_simplification.simplify(
        (UNITS / extent * vertices[first][keys[:, 0]]).astype(np.float32),
        corners.reshape(-1, 3).astype(np.int32),
        target_count=min(wanted, len(merged)),
        preserve_border=room,
    )
    old, new = vertices[first][merged], (extent / UNITS * points[corners]).astype(np.float64)
    parts = [new, _unit(_transfer(old, merged, normals[proper], new, 0.0))]
    if texcoords is not None:
        parts.append(_transfer(old, merged, texcoords[proper], new, 0.5))
    rows = np.concatenate([part.reshape(3 * len(new), -1) for part in parts], axis=1).astype(np.float32)
    rows, index = np.unique(rows, axis=0, return_inverse=True)
    # MuJoCo's own format: numbers of vertices, normals, texture coordinates and faces, then these themselves.
    head = np.array([len(rows), len(rows), len(rows) if texcoords is not None else 0, len(new)], np.int32)
    columns = (rows[:, :3], rows[:, 3:6], rows[:, 6:], index.astype(np.int32))
    return b"".join(part.tobytes() for part in (head, *columns))


def _load(source: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Read a mesh as MuJoCo reads it.

    Returns:
        Vertices (V, 3), faces (F, 3), and at the faces' corners normals (F, 3, 3) and texture coordinates (F, 3, 2).
    """
    import mujoco

    spec = mujoco.MjSpec()
    spec.add_mesh(name="mesh", file=str(source), inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL)
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="mesh", contype=0, conaffinity=0)
    model = spec.compile()
    matrix = np.zeros(9)  # the compiler moved the mesh to its centre and principal axes
    mujoco.mju_quat2Mat(matrix, model.mesh_quat[0])
    turn = matrix.reshape(3, 3).T
    vertices = model.mesh_vert.astype(np.float64) @ turn + model.mesh_pos[0]
    normals = model.mesh_normal[model.mesh_facenormal].astype(np.float64) @ turn
    textured = model.mesh_texcoordnum[0] > 0
    texcoords = model.mesh_texcoord[model.mesh_facetexcoord].astype(np.float64) if textured else None
    return vertices, model.mesh_face.copy(), normals, texcoords


def _merge(vertices: np.ndarray, faces: np.ndarray, grid: float) -> tuple[np.ndarray, np.ndarray]:
    """Merge vertices on a grid; returns which vertices stay, and the faces as indices into these."""
    cells = np.round(vertices / grid).astype(np.int64)
    _, first, index = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    return first, index.reshape(-1)[faces]


def _edges(triangles: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the edges of triangles (3F, 2), and the angles, in radians, at those that two share."""
    edges = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
    order = np.lexsort(edges.T)
    shared = np.flatnonzero((edges[order][1:] == edges[order][:-1]).all(axis=1))
    normals = _face_normals(triangles)
    cosines = (normals[order[shared] // 3] * normals[order[shared + 1] // 3]).sum(axis=1)
    return edges, np.arccos(np.clip(cosines, -1, 1))


def _transfer(old: np.ndarray, faces: np.ndarray, values: np.ndarray, new: np.ndarray, reach: float) -> np.ndarray:
    """Read values at the corners of new triangles off the old ones.

    Args:
        old: Triangles of the original, (F, 3, 3).
        faces: The same as indices of vertices, (F, 3).
        values: Values at their corners, (F, 3, C).
        new: New triangles, (N, 3, 3).
        reach: How far, in barycentric coordinates, to extrapolate beyond an old triangle, less than 1. 0 for normals,
            which are read a little inside of the new triangle.

    Returns:
        Values at the corners of the new triangles, (N, 3, C).
    """
    old_normals, new_normals = _face_normals(old), _face_normals(new)
    centres = new.mean(axis=1)
    places = new if reach else (1 - NUDGE) * new + NUDGE * centres[:, None]
    samples, where = _samples(old)
    parts = _parts(faces, values)
    part_of_new = parts[_nearest(centres, new_normals, old, old_normals, samples, where)]
    result = np.empty((len(new), 3, values.shape[2]))
    for part in np.unique(part_of_new):
        mine, of_part = part_of_new == part, parts[samples] == part
        points = places[mine].reshape(-1, 3)
        facing = np.repeat(new_normals[mine], 3, axis=0)
        found = _nearest(points, facing, old, old_normals, samples[of_part], where[of_part])
        weights = _barycentric(points, old[found], reach)
        result[mine] = np.einsum("nk,nkc->nc", weights, values[found]).reshape(-1, 3, values.shape[2])
    return result


def _parts(faces: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Number the parts of a surface within which values are continuous, (F,)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rows = np.concatenate([faces.reshape(-1, 1), np.round(values.reshape(faces.size, -1) * 1e4)], axis=1)
    corners = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    count = len(faces)
    link = (np.repeat(np.arange(count), 3), count + corners)
    size = count + int(corners.max()) + 1
    return connected_components(coo_array((np.ones(len(corners)), link), shape=(size, size)), directed=False)[1][:count]


def _samples(triangles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spread points over a surface, at least one on each triangle: their triangles (S,) and places (S, 3)."""
    areas = _areas(triangles)
    random = np.random.default_rng(0)  # the same copy on every machine
    more = random.choice(len(triangles), max(30_000, len(triangles)), p=areas / areas.sum())
    index = np.concatenate([np.arange(len(triangles)), more])
    return index, np.einsum("nk,nkc->nc", random.dirichlet((1, 1, 1), len(index)), triangles[index])


def _nearest(
    points: np.ndarray,
    normals: np.ndarray,
    triangles: np.ndarray,
    triangle_normals: np.ndarray,
    samples: np.ndarray,
    where: np.ndarray,
) -> np.ndarray:
    """Find for each point the nearest triangle that faces the same way; thin shells have a triangle at both sides."""
    from scipy.spatial import cKDTree

    near = samples[cKDTree(where).query(points, k=min(24, len(where)))[1].reshape(len(points), -1)]
    alike = np.einsum("nkc,nc->nk", triangle_normals[near], normals)
    feet = np.einsum("nkv,nkvc->nkc", _barycentric(points[:, None], triangles[near], 0.0), triangles[near])
    distance = np.linalg.norm(feet - points[:, None], axis=-1)
    best = np.where(alike > 0.5, distance, 1e6 - alike).argmin(axis=1)
    return near[np.arange(len(points)), best]


def _barycentric(points: np.ndarray, triangles: np.ndarray, reach: float) -> np.ndarray:
    """Barycentric coordinates (..., 3) of points above triangles (..., 3, 3), first kept within [-reach, 1 + reach]."""
    one, two = triangles[..., 1, :] - triangles[..., 0, :], triangles[..., 2, :] - triangles[..., 0, :]
    offset = points - triangles[..., 0, :]
    d11, d12, d22 = (one * one).sum(-1), (one * two).sum(-1), (two * two).sum(-1)
    d1, d2 = (offset * one).sum(-1), (offset * two).sum(-1)
    area = np.maximum(d11 * d22 - d12 * d12, 1e-30)
    first, second = (d22 * d1 - d12 * d2) / area, (d11 * d2 - d12 * d1) / area
    weights = np.clip(np.stack([1 - first - second, first, second], axis=-1), -reach, 1 + reach)
    return weights / weights.sum(axis=-1, keepdims=True)


def _areas(triangles: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]), axis=1)


def _face_normals(triangles: np.ndarray) -> np.ndarray:
    return _unit(np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / (np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-12)
