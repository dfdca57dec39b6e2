"""Just enough understanding of C++ text for check_layers.py: comments, literals, scopes, includes.

Every function keeps the line breaks, so a line number in the result is one in the file.
"""
import re

# In this order: what begins first wins, so a quote inside a comment opens nothing, and the reverse.
_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
      | (?P<raw>\b(?:u8|[uUL])?R"(?P<delimiter>[^\s()\\]*)\(.*?\)(?P=delimiter)")
      | (?P<literal>"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')""",
    re.VERBOSE | re.DOTALL)


def _only_line_breaks(text):
    return "\n" * text.count("\n")


def without_comments(source):
    """Comments become a blank; raw strings become empty ones, since they may look like anything."""
    def replace(match):
        if match["comment"] is not None:
            return " " + _only_line_breaks(match[0])
        if match["raw"] is not None:
            return '""' + _only_line_breaks(match[0])
        return match[0]
    return _TOKEN.sub(replace, source)


def without_literals(code):
    """Strings, characters and the names of includes become empty. REQUIRES: no comments."""
    code = re.sub(r"^(\s*#\s*include)\b[^\n]*", r"\1", code, flags=re.MULTILINE)
    return _TOKEN.sub(lambda match: '""' + _only_line_breaks(match[0]), code)


def includes(code):
    """Yields (line, "quotes" or "angles", name) of every include."""
    for number, line in enumerate(code.split("\n"), 1):
        match = re.match(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', line)
        if match:
            yield number, "quotes" if match[1] else "angles", match[1] or match[2]


def using_namespace_lines(code):
    """Lines of `using namespace` outside of every function and class: at the top or in a namespace."""
    lines = []
    scopes = []  # True for a namespace
    words = without_literals(code)
    # The text since the last brace or semicolon says what an opening brace opens.
    for match in re.finditer(r"([^{};]*)([{};])", words):
        head, end = match[1], match[2]
        if end == "{":
            scopes.append(re.search(r"\bnamespace\b[^()=]*$", head) is not None
                          or re.search(r'\bextern\s*""\s*$', head) is not None)
        elif end == "}":
            if scopes:
                scopes.pop()
        elif all(scopes):
            using = re.search(r"\busing\s+namespace\b", head)
            if using:
                lines.append(words.count("\n", 0, match.start(1) + using.start()) + 1)
    return lines
