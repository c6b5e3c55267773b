"""The motion of a car from noisy positions: a smoother over the kinematic model of a car.

A car moves along its heading, and turns only while it moves: x' = v cos h, y' = v sin h, h' = v k, with speed v and
curvature k, which change as random walks. The states at all nodes (the fixes, and instants between them) that are most
probable given the fixes are found by Gauss-Newton steps; they are those of an iterated extended Rauch-Tung-Striebel
smoother (Bell, "The Iterated Kalman Smoother as a Gauss-Newton Method", 1994). A fix far off has a bounded influence
(Huber's loss). A large lateral acceleration v^2 k is improbable, which keeps the heading of a fast car from following
the noise of the fixes. While the car stands, its heading stays: the model has no other way.
"""

import numpy as np
from jaxtyping import Float64

STEP = 0.2  # s, at most between two nodes
# Standard deviations of what the model doesn't know, after one second.
_SLIP = 0.05  # m, of the position
_DRIFT = 0.01  # rad, of the heading
_ACCELERATION = 1.5  # m/s, of the speed
_STEERING = 0.07  # 1/m, of the curvature
_CURVATURE = 0.3  # 1/m, of any curvature there is: no car turns in less than 3 m
_LATERAL = 1.5  # m/s^2, of any lateral acceleration there is
_HUBER = 2.5  # standard deviations of a fix from which on its influence grows no more
_MOVING = 1.0  # m/s, from which on the course of the first guess is believed
_MAXSTEPS = 50
_ENOUGH = 1e-5  # a step's relative gain, which ends the search

States = Float64[np.ndarray, "nodes 5"]  # x, y (m), heading (rad), speed (m/s), curvature (1/m)


def smooth(
    times: Float64[np.ndarray, " fixes"], positions: Float64[np.ndarray, "fixes 2"], sigma: float, longest_gap: float
) -> tuple[Float64[np.ndarray, " nodes"], States]:
    """The most probable motion of a car through noisy positions.

    Args:
        times: of the fixes, in seconds, increasing.
        positions: x and y of the fixes, in meters.
        sigma: standard deviation of a fix's x and y, in meters.
        longest_gap: seconds without a fix over which the motion is bridged; what lies on the sides of a longer one is
            smoothed as if it were two drives.

    Returns:
        The nodes' times, at most 0.2 s apart (but for the longer gaps), and at each of them x, y, the heading
        (continuous, counter-clockwise from +x), the speed along it and the curvature.
    """
    nodes, fix_nodes = _nodes(times, longest_gap)
    spans = np.diff(nodes)
    known = spans <= longest_gap
    states = _first_guess(times, positions, nodes, sigma)
    damping = 1e-3
    cost, diagonal, below, gradient = _linearize(states, spans, known, fix_nodes, positions, sigma)
    for _ in range(_MAXSTEPS):
        step = _solve(diagonal, below, gradient, damping)
        proposed = states + step
        found = _linearize(proposed, spans, known, fix_nodes, positions, sigma)
        if found[0] < cost:
            gain, states = (cost - found[0]) / cost, proposed
            cost, diagonal, below, gradient = found
            damping = max(damping / 10, 1e-9)
            if gain < _ENOUGH:
                break
        else:
            damping *= 10
            if damping > 1e6:
                break
    return nodes, states


def _nodes(times: np.ndarray, longest_gap: float) -> tuple[np.ndarray, np.ndarray]:
    """The nodes' times, and which nodes are the fixes."""
    gaps = np.diff(times)
    pieces = np.where(gaps <= longest_gap, np.ceil(gaps / STEP - 1e-9), 1).astype(int)
    fix_nodes = np.concatenate([[0], np.cumsum(pieces)])
    return np.interp(np.arange(fix_nodes[-1] + 1), fix_nodes, times), fix_nodes


def _first_guess(times: np.ndarray, positions: np.ndarray, nodes: np.ndarray, sigma: float) -> States:
    """Positions and course of a moving average of the fixes; where it hardly moves, the course is interpolated."""
    width = 1.0 + sigma / 2  # s
    smoothed = np.empty_like(positions)
    first, last = np.searchsorted(times, times - 2 * width), np.searchsorted(times, times + 2 * width, side="right")
    for row, (start, end) in enumerate(zip(first, last, strict=True)):
        weights = np.exp(-0.5 * ((times[start:end] - times[row]) / width) ** 2)
        smoothed[row] = weights @ positions[start:end] / weights.sum()
    velocity = np.gradient(smoothed, times, axis=0)
    speed = np.hypot(*velocity.T)
    moving = speed > _MOVING
    if not moving.any():
        moving = speed >= speed.max()
    course = np.unwrap(np.arctan2(velocity[moving, 1], velocity[moving, 0]))
    heading = np.interp(nodes, times[moving], course)
    columns = [np.interp(nodes, times, column) for column in smoothed.T]
    return np.column_stack([*columns, heading, np.interp(nodes, times, speed), np.zeros(len(nodes))])


def _linearize(
    states: States,
    spans: Float64[np.ndarray, " steps"],
    known: np.ndarray,
    fix_nodes: np.ndarray,
    positions: Float64[np.ndarray, "fixes 2"],
    sigma: float,
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Half the cost, and its normal equations: diagonal blocks, blocks below them, and the negative gradient."""
    diagonal = np.zeros((len(states), 5, 5))
    gradient = np.zeros((len(states), 5))
    # The fixes.
    off = (states[fix_nodes, :2] - positions) / sigma
    distance = np.hypot(*off.T)
    weight = np.minimum(1.0, _HUBER / np.maximum(distance, 1e-12))
    cost = float(np.where(distance < _HUBER, distance**2 / 2, _HUBER * (distance - _HUBER / 2)).sum())
    diagonal[fix_nodes, 0, 0] += weight / sigma**2
    diagonal[fix_nodes, 1, 1] += weight / sigma**2
    gradient[fix_nodes, :2] -= weight[:, None] * off / sigma
    # The curvature.
    mean_span = float(spans[known].mean()) if known.any() else 1.0
    cost += float(mean_span * (states[:, 4] ** 2).sum() / _CURVATURE**2 / 2)
    diagonal[:, 4, 4] += mean_span / _CURVATURE**2
    gradient[:, 4] -= mean_span * states[:, 4] / _CURVATURE**2
    # The lateral acceleration.
    fast, bent = states[:, 3], states[:, 4]
    lateral = fast**2 * bent / _LATERAL
    slope = np.column_stack([2 * fast * bent, fast**2]) / _LATERAL  # by speed and curvature
    cost += float(mean_span * (lateral**2).sum() / 2)
    diagonal[:, 3:, 3:] += mean_span * np.einsum("ni,nj->nij", slope, slope)
    gradient[:, 3:] -= mean_span * slope * lateral[:, None]
    # The motion from each node to the next, with the means of heading, speed and curvature in between.
    before, after = states[:-1], states[1:]
    middle = (before + after) / 2
    cosine, sine, speed, curvature = np.cos(middle[:, 2]), np.sin(middle[:, 2]), middle[:, 3], middle[:, 4]
    residual = after - before
    residual[:, 0] -= speed * cosine * spans
    residual[:, 1] -= speed * sine * spans
    residual[:, 2] -= speed * curvature * spans
    half = np.zeros((len(spans), 5, 5))  # how the prediction depends on either end
    half[:, 0, 2], half[:, 0, 3] = -speed * sine * spans / 2, cosine * spans / 2
    half[:, 1, 2], half[:, 1, 3] = speed * cosine * spans / 2, sine * spans / 2
    half[:, 2, 3], half[:, 2, 4] = curvature * spans / 2, speed * spans / 2
    deviation = np.array([_SLIP, _SLIP, _DRIFT, _ACCELERATION, _STEERING])
    whitening = known[:, None] / (deviation * np.sqrt(spans)[:, None])
    residual *= whitening
    forward, backward = (np.eye(5) - half) * whitening[:, :, None], (-np.eye(5) - half) * whitening[:, :, None]
    cost += float((residual**2).sum() / 2)
    diagonal[1:] += np.einsum("nji,njk->nik", forward, forward)
    diagonal[:-1] += np.einsum("nji,njk->nik", backward, backward)
    gradient[1:] -= np.einsum("nji,nj->ni", forward, residual)
    gradient[:-1] -= np.einsum("nji,nj->ni", backward, residual)
    return cost, diagonal, np.einsum("nji,njk->nik", forward, backward), gradient


def _solve(diagonal: np.ndarray, below: np.ndarray, gradient: np.ndarray, damping: float) -> np.ndarray:
    """The damped step: elimination of a symmetric block tridiagonal system, forward, then backward."""
    count = len(diagonal)
    scale = np.einsum("nii->ni", diagonal)
    diagonal = diagonal + np.einsum("ni,ij->nij", damping * scale + 1e-9, np.eye(5))
    solved = np.empty((count, 5, 6))  # of each node: what it owes to the next one, and its own
    for node in range(count):
        block, right = diagonal[node], gradient[node]
        if node:
            block = block - below[node - 1] @ solved[node - 1, :, :5]
            right = right - below[node - 1] @ solved[node - 1, :, 5]
        upper = below[node].T if node < count - 1 else np.zeros((5, 5))
        solved[node] = np.linalg.solve(block, np.column_stack([upper, right]))
    step = solved[:, :, 5].copy()
    for node in range(count - 2, -1, -1):
        step[node] -= solved[node, :, :5] @ step[node + 1]
    return step
