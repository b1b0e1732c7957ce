"""What the program does is not what its author thinks: activations, shapes, gradients, parameters, masks."""
