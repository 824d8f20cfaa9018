"""Data plane (slots, tickets, requests) and weight plane (manifest, host buffers); they share nothing."""
