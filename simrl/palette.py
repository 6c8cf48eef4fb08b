"""The colours of every picture: Okabe and Ito's palette, told apart with any colour vision (jfly.uni-koeln.de/color)."""

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

# Not of the palette: text, axes, what lies behind, and kinds of work that are seldom seen.
INK, FAINT, PAPER, SAND, TEAL = "#333333", "#999999", "#FFFFFF", "#C2B280", "#2F5F5F"
