"""Engines predict tokens behind one protocol, `terra.engine.base`: persistence, hf, jacobi, graph and vllm."""
