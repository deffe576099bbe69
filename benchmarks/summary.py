"""Print the latest results of all benchmarks as a Markdown table, as in docs/performance.md.

python benchmarks/summary.py
"""

import json

from measuring import RESULTS


def main() -> None:
    print("| what | against | measured | target | | command |\n|---|---|---|---|---|---|")
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        for row in content.get("rows", []):
            target = f"{'≥' if row['at_least'] else '≤'} {row['target']:g} {row['unit']}"
            verdict = ("met" if row["met"] else "**not met**") + (f": {row['note']}" if row["note"] else "")
            measured = f"{row['ratio']:.3g} {row['unit']}"
            print(f"| {row['what']} | {row['against']} | {measured} | {target} | {verdict} | `{content['command']}` |")


if __name__ == "__main__":
    main()
