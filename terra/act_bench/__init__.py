"""ACT-Bench (Arai et al. 2024, arXiv 2412.05337): does a generated drive do what its trajectory says?"""
