"""Rules on numerical health: values that are no numbers, gradients that grow or vanish."""
