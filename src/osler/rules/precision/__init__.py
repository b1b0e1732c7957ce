"""Rules on mixed precision: loss scaling, float16 and bfloat16."""
