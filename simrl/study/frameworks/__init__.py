"""Launch templates of frameworks, one each, as data (see simrl/study/launch.py)."""
