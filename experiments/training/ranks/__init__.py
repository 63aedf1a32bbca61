"""Several processes that train one model: how they start, share work, agree and save."""
