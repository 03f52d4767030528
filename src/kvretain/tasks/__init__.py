"""Tasks with a known answer: generators, loaders and graders. No model, no transformers."""
