"""Words and pictures: tables, figures, Perfetto traces, the HTML report."""
