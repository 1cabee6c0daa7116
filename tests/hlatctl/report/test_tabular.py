"""LaTeX tables: text is escaped, and the table is what booktabs expects."""

from __future__ import annotations

from hlatctl.report.tabular import escape_latex, table


def test_every_special_character_is_escaped() -> None:
    assert escape_latex(r"a_b & 50 % of $x ± {y} #1 ~^ \end") == (
        r"a\_b \& 50 \% of \$x $\pm$ \{y\} \#1 \textasciitilde{}\textasciicircum{} \textbackslash{}end"
    )


def test_a_table_has_rules_caption_label_and_a_line_per_row() -> None:
    text = table(["task", "score"], [["mmlu_stem", "41 %"]], caption="Scores of run a_b.", label="tab:scores")
    assert "\\caption{Scores of run a\\_b.}\n\\label{tab:scores}\n" in text
    assert (
        "\\begin{tabular}{ll}\n\\toprule\ntask & score \\\\\n\\midrule\nmmlu\\_stem & 41 \\% \\\\\n\\bottomrule" in text
    )


def test_a_table_of_facts_has_no_header_and_long_texts_break() -> None:
    text = table(["", ""], [["command", "x" * 80]], caption="c", label="l")
    assert "\\midrule" not in text
    assert "{lp{0.75\\linewidth}}" in text
