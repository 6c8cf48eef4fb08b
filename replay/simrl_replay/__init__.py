"""simrl's schedules on real vLLM workers. Imports simrl; simrl never imports it."""
