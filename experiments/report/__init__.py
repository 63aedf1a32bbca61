"""One page that shows runs, traces and sweeps side by side, opens offline and asks nobody.

``loading`` turns paths into records, ``page`` turns records into the page; what the page shows is
drawn by the scripts in ``assets`` from the data inside it. Nothing here loads torch.
"""
