"""The transformer decoder as its equations say, in float64, token by token; shares no code with it.

Times are absolute: rotary scores depend on differences alone, so a window-relative stream must
come to the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.flash import FlashNetwork
from tests.oracles import slow_attention, slow_rotate


class SlowFlash:
    """Decodes a whole clip.

    Args:
        network: whose weights are read.
        rows: token rows.
        columns: token columns.
    """

    def __init__(self, network: FlashNetwork, rows: int, columns: int) -> None:
        self.config = network.config
        self.rows, self.columns = rows, columns
        self.weights = {name: value.double() for name, value in network.state_dict().items()}

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [T, C, h, w] to pixels [F, 3, H, W] float64."""
        config = self.config
        frames = config.frames_per_latent
        xs = []
        for frame in latents.double():
            tokens = self.linear(self.fold(frame), "embed")
            if config.position_grid is not None:
                tokens = tokens + self.weights["position"]
            xs.append(tokens[None])
        for layer in range(config.num_layers):
            window = None if layer in config.global_layers else config.window
            xs = self.block(f"blocks.{layer}", xs, config.num_heads, 1, window, layer)
        ys = []
        for x, frame in zip(xs, latents.double(), strict=True):
            wide = self.linear(x[0], "split")  # [N, frames * D]
            y = torch.stack(wide.chunk(frames, -1))
            if config.is_factored:
                own = torch.stack(frame.chunk(frames))  # [frames, C / frames, h, w]
                y = y + self.linear(own.flatten(2).transpose(1, 2), "embed_frame")
            ys.append(y)
        heads = config.refined // config.head_dim
        for layer in range(config.refine_layers):
            ys = self.block(
                f"refinement.{layer}", ys, heads, config.refine_memory, config.window, layer
            )
        ys[0] = ys[0][frames - config.first_frames :]
        return torch.stack([self.paint(sub) for y in ys for sub in y])

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]
        )

    def fold(self, frame: Tensor) -> Tensor:
        n = self.config.fold
        tokens = []
        for row in range(self.rows):
            for column in range(self.columns):
                cell = frame[:, row * n : row * n + n, column * n : column * n + n]
                tokens.append(cell.flatten())
        return torch.stack(tokens)

    def block(
        self,
        name: str,
        xs: list[Tensor],
        heads: int,
        memory: int,
        window: int | None,
        layer: int,
    ) -> list[Tensor]:
        """xs: per latent frame [f, N, D]."""
        f, n, _ = xs[0].shape
        groups = self.config.num_kv_heads
        qs, ks, vs = [], [], []
        for t, x in enumerate(xs):
            h = self.norm(x, f"{name}.norm1")
            q, k, v = (self.linear(h, f"{name}.to_{part}") for part in "qkv")
            q, k, v = q.view(f, n, heads, -1), k.view(f, n, groups, -1), v.view(f, n, groups, -1)
            k, v = self.norm(k, f"{name}.norm_k"), self.norm(v, f"{name}.norm_v")
            times = [t * f + j for j in range(f)]
            qs.append([slow_rotate(q[j], times[j], self.columns) for j in range(f)])
            ks.append([slow_rotate(k[j], times[j], self.columns) for j in range(f)])
            vs.append(list(v))
        same = self.same_window(window, layer)
        outs = []
        for t, x in enumerate(xs):
            keys, values = list(ks[t]), list(vs[t])
            if t:
                keys = ks[t - 1][f - memory :] + keys
                values = vs[t - 1][f - memory :] + values
            repeat = heads // groups
            k = torch.cat(keys).repeat_interleave(repeat, 1)
            v = torch.cat(values).repeat_interleave(repeat, 1)
            mask = same.repeat(1, len(keys))
            seen = torch.stack([slow_attention(q, k, v, mask) for q in qs[t]])
            x = x + self.linear(seen.flatten(2), f"{name}.to_out")
            h = self.norm(x, f"{name}.norm2")
            gate = self.linear(h, f"{name}.ffn.gate")
            gated = gate * torch.sigmoid(gate) * self.linear(h, f"{name}.ffn.up")
            outs.append(x + self.linear(gated, f"{name}.ffn.down"))
        return outs

    def same_window(self, window: int | None, layer: int) -> Tensor:
        """[N, N] bool."""
        shift = 0 if window is None or layer % 2 == 0 else window // 2

        def place(index: int, length: int) -> int:
            if window is None or window >= length:
                return 0
            return (index + window - shift) // window if shift else index // window

        places = [
            (place(row, self.rows), place(column, self.columns))
            for row in range(self.rows)
            for column in range(self.columns)
        ]
        return torch.tensor([[a == b for b in places] for a in places])

    def paint(self, tokens: Tensor) -> Tensor:
        """Refined tokens [N, D] of a pixel frame to [3, H, W]."""
        if self.config.has_mlp:
            h = self.linear(self.norm(tokens, "norm_mlp"), "mlp.0")
            tokens = tokens + self.linear(h * torch.sigmoid(h), "mlp.1")
        painted = self.linear(self.norm(tokens, "norm_out"), "proj_out")
        cells = painted.new_zeros(48, 4 * self.rows, 4 * self.columns)
        for index, token in enumerate(painted):
            row, column = 4 * (index // self.columns), 4 * (index % self.columns)
            cells[:, row : row + 4, column : column + 4] = token.view(48, 4, 4)
        if self.config.seam_conv:
            weight, bias = self.weights["conv_out.weight"], self.weights["conv_out.bias"]
            around = torch.nn.functional.pad(cells, (1, 1, 1, 1))
            mixed = bias[:, None, None].expand_as(cells)
            for i in range(3):
                for j in range(3):
                    part = around[:, i : i + cells.shape[1], j : j + cells.shape[2]]
                    mixed = mixed + torch.einsum("oc,chw->ohw", weight[:, :, i, j], part)
            cells = cells + mixed
        height, width = cells.shape[1:]
        pixels = cells.view(3, 4, 4, height, width).permute(0, 3, 1, 4, 2)
        pixels = pixels.reshape(3, 4 * height, 4 * width)
        if self.config.position_grid is not None:
            pixels = pixels * 0.5 + self.weights["canvas"]
        return pixels
