"""The schedules of simrl on real vLLM workers. Imports simrl; simrl never imports it."""
