"""`dvla.train` in a process whose global random generators stand elsewhere than usual: nothing may depend on them."""

import random

import numpy as np
import torch

from dvla.train import main

if __name__ == "__main__":
    random.seed(123)
    np.random.seed(456)  # noqa: NPY002
    torch.manual_seed(789)
    main()
