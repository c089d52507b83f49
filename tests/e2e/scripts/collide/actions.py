"""The user's own `actions`: prints every tenth loss."""


def report(step: int, loss: float) -> None:
    """Print the loss at every tenth step."""
    if step % 10 == 0:
        print(f"user action: step {step} loss {loss:.4f}", flush=True)
