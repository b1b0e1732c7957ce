"""What runs inside the training process: taps record facts and rows, nothing is judged here.

``install`` patches torch once; ``session`` holds the state; ``taps/`` has one file per observed thing; ``trace`` records
a few steps operation by operation; ``experiments/`` asks questions in a forked copy of the process.
"""
