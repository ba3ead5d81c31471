"""The fused Hopper backward alone: correctness on small ragged shapes, then times. Wrap with timeout.

    timeout 280 python .dev/fused_check.py [check] [time] [sweep]      (default: check time)
"""
import sys; sys.path.insert(0, '.')
import ctypes, os, struct
from dataclasses import replace
import torch, cupy
import streamkl_cupy as S
from streamkl_cupy import calls, validate, launch, planning
from streamkl_cupy.arch import Work, ARGS_BYTES, ELEMENT_CODES, sm90_fused as F
from streamkl_cupy.compile import load
from streamkl_cupy.divergences import DIVERGENCES
from streamkl_cupy.masks import MASKS
from streamkl_cupy.problem import INPUT_NAMES, Options
from streamkl_cupy.source import flatten
from streamkl_cupy.tensor_maps import encode

def row_of(work, facts):
    return [t for t in F.TABLE if work.dim <= t.max_dim and work.out_dim <= t.max_out and F.smem_bytes(work, t) <= facts.smem_per_block][int(os.environ.get('ALT', '0'))]

class Fused:
    def __init__(self, x, side='student', row=None, head_group=None, extra={}, edit=(), **options):
        views = calls.view_inputs(*x)
        self.p = p = validate.to_problem(views, Options(**options))
        facts = launch.device_facts(p.device.index)
        w = Work(p, side)
        assert not F.refuses(w)
        t = row or row_of(w, facts)
        smem = F.smem_bytes(w, t)
        size = -(-(512 + ARGS_BYTES['fused']) // 64) * 64
        k = dict(SKL_T_ELEMENT=ELEMENT_CODES[p.teacher.dtype], SKL_S_ELEMENT=ELEMENT_CODES[p.student.dtype], SKL_T_DIM=p.teacher.dim, SKL_S_DIM=p.student.dim,
                 SKL_PLANES=3, SKL_ROWS=t.rows, SKL_COLUMNS=64, SKL_WARPS=t.warps, SKL_WARP_TILES=t.warp_tiles, SKL_STAGES=t.stages, SKL_GRAD_SIDE=int(side == 'student'),
                 SKL_SMEM_BYTES=smem, SKL_ARGS_BYTES=size, **F.constants(w, t), **extra)
        text = flatten('kernels/fused_sm90.cu', k, dict(divergence=DIVERGENCES['kl'].header, mask=MASKS[p.mask.name].header))
        for a, b in edit:
            assert a in text, a
            text = text.replace(a, b)
        self.k = [load(text, n, 'sm_90a', smem_bytes=b).kernel.ptr for n, b in (('streamkl_fused_prepare', 0), ('streamkl_fused', smem), ('streamkl_fused_finish', 0))]
        tiles = -(-p.keys // t.rows)
        small = p.batch * p.heads * F.query_tiles(w)
        self.grids = [(small, 128, 0), (p.batch * w.heads * tiles, F.THREADS, smem), (small, 128, 0)]
        self.ws = torch.full((F.workspace_bytes(w) // 4,), float('nan'), device='cuda')
        own, other = (x[2], x[3]) if side == 'student' else (x[0], x[1]), None
        self.dq, self.dk = torch.full_like(own[0], float('nan')).contiguous(), torch.full_like(own[1], float('nan')).contiguous()
        self.x, self.side, self.size = x, side, size
        self.maps = b''.join(encode(v.ptr, p.operand(n), p.batch, t.rows if n.endswith('_k') else 64) for n, v in zip(INPUT_NAMES, views))
        T4 = launch._TENSOR4.pack
        self.ops = b''.join(T4(v.ptr, *p.operand(n).strides) for n, v in zip(INPUT_NAMES, views))
        mask = [p.mask[n] for n in MASKS[p.mask.name].params]
        group = head_group or planning._head_group(p, True)
        ext = launch._EXTENTS.pack(p.batch, p.heads, p.queries, p.keys, max(p.teacher.group, 1), max(p.student.group, 1), tiles, group, 1, 0, *mask, *[0] * (4 - len(mask)))
        s = p.teacher if side == 'teacher' else p.student
        self.out = T4(self.dk.data_ptr(), *p.compact_input_strides(side + '_k'))
        self.tail = ext + launch._GRADIENT_TAIL.pack(p.teacher.scale * launch.LOG2E, p.student.scale * launch.LOG2E, s.scale, 0) \
            + T4(self.dq.data_ptr(), *p.compact_input_strides(side + '_q')) + struct.pack('=Q', self.ws.data_ptr())
        self.launch = cupy.cuda.driver.launchKernel
    def bind(self, g, lt, ls, kl):
        rows = b''.join(launch._TENSOR3.pack(v.data_ptr(), *v.stride()) for v in (g, lt, ls, kl))
        self.keep = (g, lt, ls, kl)
        raw = (self.maps + self.ops + rows + self.out + self.tail).ljust(self.size, b'\0')
        self.buf = (ctypes.c_uint8 * len(raw)).from_buffer_copy(raw)
        self.par = ctypes.c_void_p(ctypes.addressof(self.buf))
        return self
    def __call__(self, only=None):
        st = torch.cuda.current_stream().cuda_stream
        for i, (k, (b, t, sm)) in enumerate(zip(self.k, self.grids)):
            if only is None or i in only: self.launch(k, b, 1, 1, t, 1, 1, sm, st, ctypes.addressof(self.par), 0)

def ref(x, g, causal, off, group_t, group_s, side):
    d = [v.double() for v in x]
    d[1], d[3] = d[1].repeat_interleave(group_t, 1), d[3].repeat_interleave(group_s, 1)
    T = d[0] @ d[1].transpose(2, 3) * x[0].shape[-1] ** -.5
    U = d[2] @ d[3].transpose(2, 3) * x[2].shape[-1] ** -.5
    M, N = T.shape[2:]
    m = torch.ones(M, N, dtype=torch.bool, device='cuda')
    if causal: m = m.tril(off)
    T, U = T.masked_fill(~m, -1e300), U.masked_fill(~m, -1e300)
    lp, lq = T.log_softmax(-1), U.log_softmax(-1)
    P, Q = lp.exp(), lq.exp()
    if side == 'student': dX = Q - P
    else:
        kl = (P * (lp - lq)).masked_fill(~m, 0).sum(-1, keepdim=True)
        dX = P * (lp - lq - kl)
    seen = m.any(-1)
    dX = dX.masked_fill(~m, 0) * torch.where(seen, g.double(), 0.)[..., None] * x[2 if side == 'student' else 0].shape[-1] ** -.5
    q, k, grp = (d[2], d[3], group_s) if side == 'student' else (d[0], d[1], group_t)
    dq, dk = dX @ k, dX.transpose(2, 3) @ q
    B, H, N, D = dk.shape
    return dq, dk.view(B, H // grp, grp, N, D).sum(2)

def err(a, b): return ((a.double() - b).norm() / b.norm().clamp_min(1e-300)).item()

def check():
    bf, hf = torch.bfloat16, torch.float16
    cases = []
    for causal in (False, True):
        for D in (64, 128):
            cases += [(1, 2, 2, 2, 256, 256, D, D, causal, None, bf, 'student'), (1, 3, 3, 3, 1000, 1111, D, D, causal, None, bf, 'student'),
                      (2, 4, 2, 1, 200, 333, D, D, causal, None, bf, 'student'), (2, 4, 1, 2, 777, 513, D, D, causal, None, bf, 'student'),
                      (1, 2, 2, 2, 300, 300, D, D, causal, -37, bf, 'student'), (1, 2, 2, 2, 65, 300, D, D, causal, 17, bf, 'student'),
                      (1, 2, 2, 2, 1, 1, D, D, causal, None, bf, 'student'), (1, 2, 2, 2, 640, 700, D, D, causal, None, hf, 'student'),
                      (1, 4, 2, 2, 640, 700, D, D, causal, None, bf, 'teacher'), (1, 4, 2, 2, 640, 700, D, D, causal, None, hf, 'teacher')]
        for a, b in ((64, 128), (128, 64), (192, 128), (256, 128), (256, 64), (8, 8), (72, 40), (80, 96), (16, 120)):
            cases += [(1, 2, 2, 1, 500, 400, a, b, causal, None, bf, 'student')]
        cases += [(1, 2, 1, 2, 500, 400, 128, 192, causal, None, bf, 'teacher'), (1, 2, 1, 2, 500, 400, 96, 256, causal, 0, hf, 'teacher')]
    bad = 0
    part, parts = map(int, os.environ.get('SHARD', '0/1').split('/'))
    cases = cases[part::parts]
    for B, H, ht, hs, M, N, Dt, Ds, causal, off, dt, side in cases:
        torch.manual_seed(M + N)
        r = lambda h, n, d: torch.randn(B, h, n, d, device='cuda').to(dt)
        x = [r(H, M, Dt), r(ht, N, Dt), r(H, M, Ds), r(hs, N, Ds)]
        o = N - M if off is None else off
        if causal:  # memory that nobody sees
            for i in (0, 2): x[i][:, :, :max(-o, 0)] = float('nan')
            for i in (1, 3): x[i][:, :, max(M + o, 0):] = float('nan')
        opt = dict(causal=causal, q_offset=off if causal else None)
        g = torch.randn(B, H, M, device='cuda'); g[..., ::7] = 0; g[..., 3::11] *= 1e-3
        f = S.attention_kl_forward(*x, **opt)
        clean = [v.nan_to_num() for v in x]
        dq, dk = ref(clean, g, causal, o, H // ht, H // hs, side)
        k = Fused(x, side, **opt).bind(g.transpose(1, 2).contiguous().transpose(1, 2), f.teacher_lse, f.student_lse, f.kl)
        k(); torch.cuda.synchronize()
        first = k.dk.clone(); a, b = err(k.dq, dq), err(k.dk, dk)
        k.dk.fill_(float('nan')); k(); torch.cuda.synchronize()
        same = torch.equal(first, k.dk)
        lim = 4e-3 if dt == bf else 6e-4
        # Rows of the queries whose g is small must be as precise as the others.
        rows = ((k.dq.double() - dq).norm(dim=-1) / dq.norm(dim=-1).clamp_min(1e-30))[dq.norm(dim=-1) > 0]
        rows = rows[(dq.norm(dim=-1) > 2e-2 * dq.norm(dim=-1).max())[dq.norm(dim=-1) > 0]] if dt == hf else rows
        worst = rows.max().item() if rows.numel() else 0.
        ok = a < lim and b < lim and same and worst < 12 * lim
        bad += not ok
        print('ok  ' if ok else 'BAD ', side, dt, (B, H, ht, hs, M, N), (Dt, Ds), 'causal' if causal else 'full', off, f'dq {a:.1e} (worst row {worst:.1e}) dk {b:.1e} dk repeats {same}', flush=True)
    print('bad', bad, 'of', len(cases), flush=True)

def timing(sweep):
    from triton.testing import do_bench
    from torch.nn.attention import sdpa_kernel, SDPBackend
    bench = lambda f, ms=50: do_bench(f, warmup=20, rep=ms, return_mode='median')
    for H, N, D, causal in ((8, 8192, 64, False), (8, 8192, 64, True), (8, 8192, 128, False), (8, 8192, 128, True)):
        if True:
            x = [torch.randn(1, H, N, D, device='cuda', dtype=torch.bfloat16) for _ in range(4)]
            f = S.attention_kl_forward(*x, causal=causal)
            g = torch.full((1, H, N), 1 / (H * N), device='cuda') * torch.rand(1, H, N, device='cuda')
            fl = 2 * H * N * N * 4 * D / (2 if causal else 1)
            rows = [(None, None, {})]
            if sweep:
                bases = [F.TABLE[0], replace(F.TABLE[0], stages=5, other_stages=5, stagings=1), replace(F.TABLE[0], stages=4, other_stages=3, handovers=3)] if D == 64 else [F.TABLE[3], replace(F.TABLE[3], handovers=2, stagings=2), replace(F.TABLE[3], handovers=2, stages=4)]
                rows = [(r, n, {}) for r in bases for n in ((1, 8) if not causal else (2, 8))]
            for row, group, extra in rows:
                k = Fused(x, row=row, head_group=group, extra=extra, causal=causal).bind(g, f.teacher_lse, f.student_lse, f.kl)
                t = bench(k); parts = [bench(lambda i=i: k({i}), 15) for i in (range(3) if row is None else [1])]
                label = extra if row is None else {**extra, **{n: getattr(row, n) for n in ('stages', 'other_stages', 'handovers', 'warps', 'warp_tiles')}}
                print(N, f'D {D}', 'causal' if causal else 'full', f'fused {t:.4f} ms {fl / t / 1e9:.0f} TFLOP/s  parts', ' '.join(f'{v:.4f}' for v in parts), label, '' if group is None else f'head group {group}', flush=True)
            q, kk, v = (z.clone().requires_grad_() for z in (x[0], x[1], x[3]))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                o = torch.nn.functional.scaled_dot_product_attention(q, kk, v, is_causal=causal)
                go = torch.randn_like(o)
                t = bench(lambda: torch.autograd.grad(o, (q, kk, v), go, retain_graph=True))
            print(f'D {D}', 'causal' if causal else 'full', f'cudnn {t:.4f} ms {10 * H * N * N * D / (2 if causal else 1) / t / 1e9:.0f} TFLOP/s (its own 5 products)', flush=True)

def ablate():
    from triton.testing import do_bench
    bench = lambda f, ms=25: do_bench(f, warmup=10, rep=ms, return_mode='median')
    add = ('bulk_add(sums + sum_index(c, 0, thread), mine, sum_tiles(c) * 512);', '')
    stage = ('for (int d = 0; d < sum_tiles(c); ++d) store_float4(mine', 'for (int d = 0; d < 1; ++d) store_float4(mine')
    dq = ('for (int k = 0; k < kSubRows / 16; ++k)\n', 'for (int k = 0; k < 1; ++k)\n')
    fence = ('        async_fence();\n        __syncwarp();\n        release(handed', '        __syncwarp();\n        release(handed')
    dk = ('for (int k = 0; k < kTiles / 2; ++k)\n            wgmma<Own::kHalf, 1>(sum', 'for (int k = 0; k < 1; ++k)\n            wgmma<Own::kHalf, 1>(sum')
    exp = ('return exp2_approx(y) - exp2_approx(x);', 'return y - x;')
    half = ('return exp2_approx(y) - exp2_approx(x);', 'return exp2_approx(y) - x;')
    hand = ('for (int k = 0; k < kTiles / 2; ++k) hand_over(hand, k, dx[k]);', 'for (int k = 0; k < 1; ++k) hand_over(hand, k, dx[k]);')
    weight = ('dx *= kNarrow ? plain_scale(row) : row.weight;', '')
    terms = ('Terms::read(x, terms, 4 * c + pair);', 'Terms::read(x, terms, pair);')
    H, N = 8, 8192
    for D in (64, 128):
        x = [torch.randn(1, H, N, D, device='cuda', dtype=torch.bfloat16) for _ in range(4)]
        f = S.attention_kl_forward(*x)
        g = torch.full((1, H, N), 1 / (H * N), device='cuda') * torch.rand(1, H, N, device='cuda')
        base = F.TABLE[0] if D == 64 else replace(F.TABLE[3], ahead=False, other_stages=2, stages=4)
        for name, edit in dict(all=(), add=(add,), add_stage=(add, stage), dq=(add, stage, dq), fence=(fence,), dk=(dk,), exp=(exp,), half=(half,), hand=(hand,), weight=(weight,), terms=(terms,), dq_exp=(add, stage, dq, exp),
                               dq_fence=(add, stage, dq, fence), dq_exp_fence=(add, stage, dq, exp, fence), rest=(add, stage, dq, exp, fence, dk, hand), terms_exp=(terms, exp, weight)).items():
            k = Fused(x, row=base, edit=edit).bind(g, f.teacher_lse, f.student_lse, f.kl)
            t = bench(lambda: k({1}))
            print(f'D {D} without {name}: {t:.4f} ms, {t * 1.755e6 * 132 / (H * N * N / 8192) :.0f} cycles per 8192 pairs', flush=True)

if __name__ == '__main__':
    print(torch.cuda.get_device_name(), cupy.cuda.nvrtc.getVersion(), flush=True)
    a = sys.argv[1:] or ['check', 'time']
    if 'check' in a: check()
    if 'ablate' in a: ablate()
    if 'time' in a or 'sweep' in a: timing('sweep' in a)
