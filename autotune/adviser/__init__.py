"""The process that proposes the next setting to try: questions, forecasts, search."""
