"""Linear attention without a state, and the causal convolution over the whole sequence.

With S_t = e^(g_t) S_(t-1) + k_t u_t^T and u_t = beta_t (v_t - S'_t^T k_t), S'_t the decayed state, every state is a sum
over earlier tokens: S_t = sum_(s<=t) e^(G_t - G_s) k_s u_s^T with G the running sum of g. So u is the solution of a
triangular system whose entries are beta_t e^(G_t - G_s) (k_t . k_s), and the outputs are a masked product.
"""

from __future__ import annotations

import math

import numpy as np

from engine.oracle.inputs import MICROSOFT, Array, Computed, Inputs, Unserved, rule, sigmoid, softplus


@rule("LinearAttention", MICROSOFT)
@rule("LinearAttention")
def _linear_attention(i: Inputs) -> Computed:
    """Queries, keys, values [1, T, heads * size], the decay's logarithm, beta."""
    kind = i.node.attributes.get("update_rule", "gated_delta")
    i.only("update_rule", "gated_delta", "linear", "gated", "delta")
    i.only("state_window", 0)
    q, k, v = i.floats(0), i.floats(1), i.floats(2)
    t, q_heads, heads = q.shape[1], i.whole("q_num_heads", 0), i.whole("kv_num_heads", 0)
    if q.shape[0] != 1:
        raise Unserved(f"a batch of {q.shape[0]}")
    size = q.shape[2] // q_heads
    q, k, v = q.reshape(t, q_heads, size), k.reshape(t, -1, size), v.reshape(t, heads, -1)
    decay = i.floats(4).reshape(t, heads, -1) if "gated" in kind else np.zeros((t, heads, 1), np.float32)
    beta = i.floats(5).reshape(t, -1) if "delta" in kind else None
    scale = i.number("scale", 0.0) or 1 / math.sqrt(size)
    made = _read_outs(q, k, v, decay, beta, np.float32(scale))
    return made.reshape(1, t, -1), i.begun(3)


@rule("LinearAttentionGate", MICROSOFT)
def _gate(i: Inputs) -> Computed:
    """(a, dt_bias, -exp(A_log), b) to the decay's logarithm and beta."""
    return np.asarray(i.floats(2) * softplus(i.floats(0) + i.floats(1))), sigmoid(i.floats(3))


@rule("GatedDeltaNet", MICROSOFT)
def _gated_delta_net(i: Inputs) -> Computed:
    """Queries, keys, values [1, T, heads, size], raw gates, the state, A_log, dt_bias."""
    i.only("update_rule", "gated_delta")
    for name, served in (("gate_activation", "qwen"), ("beta_activation", "sigmoid")):  # absent is "none"
        if i.node.attributes.get(name) != served:
            raise Unserved(f"{name} = {i.node.attributes.get(name, 'none')!r}")
    if i.has(3):
        raise Unserved("packed sequences")
    q, k, v = (i.floats(n)[0] for n in range(3))
    if i.whole("qk_l2_norm", 0):
        q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(1e-6)) for x in (q, k))
    decay = -np.exp(i.floats(7)) * softplus(i.floats(4)[0] + i.floats(8))
    scale = i.number("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    made = _read_outs(q, k, v, decay[..., None], sigmoid(i.floats(5)[0]), np.float32(scale))
    return made[None], i.start(6)


def _read_outs(q: Array, k: Array, v: Array, decay: Array, beta: Array | None, scale: np.float32) -> Array:
    """o_t = scale * S_t^T q_t after the update, [T, max(query heads, value heads), dv].

    A head of keys or queries serves as many neighbouring value heads as there are fewer of them, and the other way.
    """
    t, heads = v.shape[:2]
    outs = max(q.shape[1], heads)
    made = np.empty((t, outs, v.shape[2]), np.float32)
    for h in range(heads):
        key = k[:, h * k.shape[1] // heads]
        total = np.cumsum(decay[:, h], axis=0, dtype=np.float64)
        u = v[:, h]
        if beta is not None:
            b = beta[:, h * beta.shape[1] // heads, None]
            u = _solved(b * _decayed(key, key, total), b * v[:, h])
        for o in range(h * outs // heads, (h + 1) * outs // heads):
            query = q[:, o * q.shape[1] // outs]
            made[:, o] = scale * np.matmul(_decayed(query, key, total), u)
    return made


def _decayed(x: Array, y: Array, total: Array) -> Array:
    """e^(G_t - G_s) (x_t . y_s) for s <= t, else 0; G is one number a token, or one a channel."""
    if total.shape[1] == 1:
        age = np.minimum(total - total.T, 0)  # what lies ahead is masked, and must not overflow
        return np.asarray(np.tril(np.matmul(x, y.T) * np.exp(age)), np.float32)
    rows = [np.matmul(y * np.exp(np.minimum(g - total, 0)), row) for row, g in zip(x, total, strict=True)]
    return np.tril(np.stack(rows)).astype(np.float32)


def _solved(lower: Array, right: Array) -> Array:
    """u with u_t + sum_(s<t) lower[t, s] u_s = right_t."""
    u = np.empty_like(right)
    for t in range(len(u)):
        u[t] = right[t] - lower[t, :t] @ u[:t]
    return u


@rule("CausalConvWithState", MICROSOFT)
@rule("CausalConvWithState")
def _causal_conv(i: Inputs) -> Computed:
    """y_t = act(bias + sum over taps of w_j x_(t - taps + 1 + j)), channel by channel, nothing before the start."""
    i.only("activation", "none", "silu", "swish")
    for name, served in (("ndim", 1), ("dilation", 1), ("channels_last", 0), ("state_window", 0)):
        i.only(name, served)
    x, w = i.floats(0), i.floats(1)
    taps = w.shape[-1]
    made = np.zeros_like(x)
    for j in range(taps):
        back = taps - 1 - j
        made[..., back:] += w[None, :, 0, j, None] * x[..., : x.shape[-1] - back]
    if i.has(2):
        made += i.floats(2)[None, :, None]
    if i.node.attributes.get("activation", "none") != "none":
        made *= sigmoid(made)
    return made, i.begun(3)


@rule("GatedAdd", MICROSOFT)
def _gated_add(i: Inputs) -> Computed:
    return np.asarray(i.floats(0) + i.floats(1) * i.floats(2))
