"""A small user's file for the commands that fit: shared by their tests."""

TRAIN = """
import torch
import memfit

def build(width=4, outputs=1):
    model = torch.nn.Linear(width, outputs, bias=False)
    print("words of the user's")
    return memfit.Step(model, lambda m, b: m(b).pow(2).mean(), torch.optim.SGD(model.parameters(), 0.1), torch.ones(3, width))

def wider():
    return build(4096)

def loaded():
    step = build()
    batches = [torch.full((3, 4), 1.0 + n) for n in range(2)]
    return memfit.Step(step.model, step.loss, step.optimizer, step.batch, loader=batches)

def phased():
    step = build()
    phase = memfit.Phase("only", lambda m, b, carry: m(b).pow(2).mean(), step.optimizer)
    return memfit.Step(step.model, phases=[phase], batch=step.batch)

def broken():
    step = build()
    return memfit.Step(step.model, lambda m, b: m(b[:, :2]).mean(), step.optimizer, step.batch)

def leaking():
    step, kept = build(), []
    def loss(m, b):
        kept.append(torch.zeros(2**20))
        return m(b).pow(2).mean()
    return memfit.Step(step.model, loss, step.optimizer, step.batch)

def looking():
    step = build()
    return memfit.Step(step.model, lambda m, b: m(b).mean() * (2 if b.sum() > 0 else 1), step.optimizer, step.batch)

def grown():
    return build(outputs=4096)
"""
