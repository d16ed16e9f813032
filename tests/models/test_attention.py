from __future__ import annotations

import logging

import pytest
import torch
from torch.testing import assert_close

from rtgen.errors import BackendUnavailable, ConfigError
from rtgen.models.attention import BACKENDS, UNMASKED_BACKENDS, attention, resolve_backend
from tests.oracles import slow_attention

Q, K, V = torch.randn(3, 2, 7, 2, 24).unbind(0)
MASKS = {
    "none": None,
    "keys": torch.tensor([1, 1, 0, 1, 0, 1, 1]).bool(),
    "queries and keys": torch.ones(7, 7).tril().bool(),
    "rows": torch.stack((torch.ones(7, 7).tril(), torch.ones(7, 7))).bool(),
}


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
@pytest.mark.parametrize("name", MASKS)
def test_backends_equal_slow_attention(name: str, backend: str) -> None:
    mask = MASKS[name]
    out = attention(Q, K, V, mask, backend)
    for row in range(2):
        dense = None
        if mask is not None:
            dense = mask[row] if mask.ndim == 3 else mask.expand(7, 7)
        assert_close(out[row], slow_attention(Q[row], K[row], V[row], dense))


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_planted_leak_in_the_mask_is_seen(backend: str) -> None:
    mask = torch.ones(7, 7).tril().bool()
    leaking = mask.clone()
    leaking[2, 3] = True
    difference = attention(Q, K, V, leaking, backend) - attention(Q, K, V, mask, backend)
    assert difference[:, 2].abs().max() > 1e-3
    assert difference[:, :2].abs().max() == 0


def test_backends_agree_in_bfloat16() -> None:
    q, k, v = Q.bfloat16(), K.bfloat16(), V.bfloat16()
    assert attention(q, k, v, None, "naive").dtype == torch.bfloat16
    assert_close(attention(q, k, v, None, "naive"), attention(q, k, v), atol=1e-2, rtol=1e-2)


def test_gradients_of_backends_agree() -> None:
    grads = []
    for backend in ("sdpa", "naive"):
        q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
        loss = attention(q, k, v, MASKS["queries and keys"], backend).square().sum()
        grads.append(torch.autograd.grad(loss, (q, k, v)))
    assert_close(grads[0], grads[1])


@pytest.mark.parametrize("name", UNMASKED_BACKENDS)
def test_a_backend_that_cannot_run_here_is_refused(name: str) -> None:
    with pytest.raises(BackendUnavailable, match="needs a CUDA device"):
        resolve_backend(name, "cpu")
    with pytest.raises(ConfigError, match="takes no mask"):
        attention(Q, K, V, MASKS["keys"], name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        resolve_backend("sdpa", "cuda")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="sdpa"):
        resolve_backend("flash", "cpu")
    with pytest.raises(ConfigError, match="sdpa"):
        attention(Q, K, V, None, "flash")


def test_auto_logs_its_choice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rtgen.models.attention"):
        assert resolve_backend("auto", "cpu") == "sdpa"
    assert "attention backend on cpu: sdpa" in caplog.text
    assert [resolve_backend(name, "cpu") for name in ("sdpa", "naive")] == ["sdpa", "naive"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_backends_agree_with_naive(backend: str) -> None:
    try:
        resolve_backend(backend, "cuda")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    q, k, v = (torch.randn(2, 64, 4, 64).cuda().bfloat16() for _ in range(3))
    expected = attention(q.float(), k.float(), v.float(), None, "naive")
    assert_close(attention(q, k, v, None, backend).float(), expected, atol=2e-2, rtol=2e-2)
