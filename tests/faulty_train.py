"""`dvla.train` with the fault that the variable FAULT describes (`faults`)."""

import os

import faults

from dvla.train import main

if __name__ == "__main__":
    faults.inject(faults.parse(os.environ["FAULT"]))
    main()
