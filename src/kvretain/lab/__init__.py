"""The laboratory animal: a tiny Llama, made here, that reasons at length about one thing, chains of arithmetic.

No public model small enough for a CPU does. What it says of retention holds for it alone.
"""
