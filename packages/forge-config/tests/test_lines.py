import pytest
import tomli
from forge_config.lines import key_lines
from forge_config.plain import flat

DOCUMENT = '''# a comment with [brackets] and = signs
top = 1
"quoted key" = 2
[table]   # comment
text = """
[not.a.table]
fake = 1
"""
literal = \'\'\'
x = "\'\'\'\'
after = "a # [b] = \\" c"
array = [
    1, # one
    [2, 3],
    { in_array = 4, deep = { er = 5 } },
]
inline = { a = 1, "b.c" = 2 }
dotted.key . path = 3
[[sources]]
path = "a"
[sources.tokenizer]
kind = "x"
[[sources]]
path = \'b\'
[[sources.parts]]
n = 1
[[sources.parts]]
n = 2
[other."odd.name"]
last = 1979-05-27T07:32:00Z
'''


@pytest.mark.parametrize(
    ("key", "start"),
    [
        ("top", "top ="),
        ('"quoted key"', '"quoted key"'),
        ("table", "[table]"),
        ("table.text", "text ="),
        ("table.literal", "literal ="),
        ("table.after", "after ="),
        ("table.array", "array ="),
        ("table.array[0]", "    1,"),
        ("table.array[1][1]", "    [2, 3]"),
        ("table.array[2].deep.er", "    { in_array"),
        ('table.inline."b.c"', "inline ="),
        ("table.dotted.key.path", "dotted."),
        ("sources[0].tokenizer.kind", "kind ="),
        ("sources[1].path", "path = 'b'"),
        ("sources[1].parts[0].n", "n = 1"),
        ("sources[1].parts[1].n", "n = 2"),
        ('other."odd.name".last', "last ="),
    ],
)
def test_key_lines_finds_the_line_of(key, start):
    line = DOCUMENT.splitlines()[key_lines(DOCUMENT)[key] - 1]
    assert line.startswith(start)


def test_key_lines_knows_every_leaf_that_tomli_reads():
    assert set(flat(tomli.loads(DOCUMENT))) <= set(key_lines(DOCUMENT))


def test_key_lines_finds_nothing_inside_strings():
    assert not [key for key in key_lines(DOCUMENT) if "fake" in key or "not" in key]


def test_key_lines_gives_a_table_its_first_line():
    assert key_lines("[a.b]\n[[c]]\n[a]\n[[c]]\n") == {"a": 1, "a.b": 1, "c": 2, "c[0]": 2, "c[1]": 4}


def test_key_lines_reads_windows_line_ends():
    assert key_lines("a = 1\r\n[t]\r\nb = 2\r\n") == {"a": 1, "t": 2, "t.b": 3}
