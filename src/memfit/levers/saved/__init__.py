"""saved: one decision for each tensor that autograd keeps between forward and backward."""
