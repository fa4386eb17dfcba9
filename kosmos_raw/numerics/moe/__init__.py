"""The MoE layer in NumPy, forward and backward: what kernels are judged by.

Formulas take arrays or `near.Near`: see numerics/near.py. They round to BF16 where kernels do, which is where something
is stored in BF16 or multiplied as such:

    forward   w * x where the weight is on the input; the pre-activations g and u, from which h = act(g, u) is computed;
              h; each expert's rows; the same of the shared expert; the layer's output
    backward  w * dOut; h again from g and u, and gate * h of a gated shared expert; dg and du; each expert's rows of
              dX; the layer's dX
Everything else is FP32: logits, scores, weights, folds, and weight gradients until they are stored. Gradients of logits
are multiplied as the sum of two BF16.

In MXFP8 both factors of routed experts' products, and of no other, are quantised along what the product contracts over,
of that BF16 and never of a copy that is quantised already. Along rows, which weights' gradients contract over, a block
has rows of one rank alone, as tokens follow each other; along pre-activations it has 16 of gate and the 16 of up beside
them.
"""
