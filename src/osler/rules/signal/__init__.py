"""Signal: initialisation, gradients along the depth, units that died."""
