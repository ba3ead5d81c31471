"""The distillation step in PyTorch: attention_kl is an ordinary differentiable loss.

Two nn.Linear layers learn queries and keys of head dimension 16 that attend as layer 15 of SmolLM2-135M does
(without rotary positions, to stay short). Autograd, the optimiser and autocast need nothing special; CUDA tensors run
the CUDA kernels on the current stream.

    python examples/torch_autograd.py --steps 60
"""

import argparse

from _shared import install, need, sample, training_options

DIM = 16


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="example: python examples/torch_autograd.py --steps 60 --cpu"
    )
    training_options(parser, steps=60)
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where a GPU is usable")
    options = parser.parse_args()
    torch = need("torch", install("torch"))
    streamkl = need("streamkl_cupy", install())

    cuda = torch.cuda.is_available() and not options.cpu
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    data = sample()
    hidden, teacher_q, teacher_k = (
        torch.from_numpy(data[f"layer15_{name}"]).to(device, dtype) for name in ("hidden", "q", "k")
    )
    torch.manual_seed(options.seed)
    width, heads, key_heads = hidden.shape[-1], len(teacher_q), len(teacher_k)
    project_q = torch.nn.Linear(width, heads * DIM, bias=False, device=device)
    project_k = torch.nn.Linear(width, key_heads * DIM, bias=False, device=device)
    optimiser = torch.optim.AdamW([*project_q.parameters(), *project_k.parameters()], lr=1e-2)
    print(f"torch {torch.__version__} on {device}, {dtype}: head dimension {teacher_q.shape[-1]} -> {DIM}")

    losses = []
    for step in range(options.steps):
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            # (N, H * D) -> (H, N, D): a view, read through its strides without a copy.
            student_q = project_q(hidden).unflatten(-1, (heads, DIM)).transpose(0, 1)
            student_k = project_k(hidden).unflatten(-1, (key_heads, DIM)).transpose(0, 1)
            loss = streamkl.attention_kl(teacher_q, teacher_k, student_q, student_k, causal=True, reduction="mean")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}   KL {losses[-1]:.4f} nats")

    assert losses[-1] < 0.5 * losses[0], "the loss did not halve"
    print("The student's attention follows its teacher's.")


if __name__ == "__main__":
    main()
