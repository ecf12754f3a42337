"""Prompts in many languages and lengths, a page of text, and texts to speculate on."""

from __future__ import annotations

from random import Random
from statistics import median, quantiles
from typing import TYPE_CHECKING

from roseinfer import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LINES = """\
The capital of France is
Explain in two sentences why the sky is blue during the day and red in the evening.
Write a short poem about a rose that grows in the snow.
What is 17 * 23? Think step by step.
List three differences between a list and a tuple in Python:
Translate to French: "Where is the nearest train station?"
Dear Sir or Madam, I am writing to you with regard to the invoice of 12 March, no. 4711,
Was ist der Unterschied zwischen einer Fuge und einem Kanon in der Musik?
Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist
Quelle est la différence entre un fleuve et une rivière ? Donnez un exemple.
¿Cuál es la capital de Perú y cuántos habitantes tiene? Responde en una frase.
Qual è la differenza tra il gorgonzola e il taleggio? Rispondi brevemente.
Qual é a diferença entre o português do Brasil e o de Portugal?
Wat is het verschil tussen een fiets en een bromfiets in Nederland?
Jaka jest stolica Polski i ile osób tam mieszka? Odpowiedz jednym zdaniem.
Jaký je rozdíl mezi řekou a potokem? Uveďte příklad z Čech.
Vad är skillnaden mellan en sjö och ett hav? Svara kortfattat.
Mikä on Suomen pääkaupunki, ja kuinka monta asukasta siellä on?
Mi Magyarország fővárosa, és hány lakosa van a városnak?
Türkiye'nin başkenti neresidir ve kaç kişi yaşıyor? Kısaca cevap ver.
Столица России — это какой город? Ответь одним коротким предложением.
Яка столиця України і скільки там мешканців? Дай коротку відповідь.
Ποια είναι η πρωτεύουσα της Ελλάδας και πόσους κατοίκους έχει;
ما هي عاصمة مصر وكم عدد سكانها؟ أجب بجملة واحدة قصيرة.
מהי בירת ישראל וכמה תושבים יש בה? ענה במשפט אחד.
भारत की राजधानी क्या है और वहाँ कितने लोग रहते हैं?
ประเทศไทยมีเมืองหลวงชื่ออะไร และมีประชากรกี่คน
Thủ đô của Việt Nam là gì và có bao nhiêu người sinh sống ở đó?
日本の首都はどこですか。人口は何人ですか。一文で答えてください。
中国的首都是哪里？那里有多少人口？请用一句话回答。
대한민국의 수도는 어디이며 인구는 몇 명입니까? 한 문장으로 답하세요.
🎉🎂 Happy birthday! 🥳 Reply with five emojis that fit: 🎁🎈
👩‍👩‍👧‍👦 is a family, 🏳️‍🌈 is a flag, and 👍🏽 is a hand. What is 🐈‍⬛?
"""  # noqa: RUF001
_BLOCKS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n',
    '{"name": "Ada", "born": 1815, "languages": ["en", "fr"], "address": {"city": "London",',
    "∀ε>0 ∃δ>0: |x−x₀|<δ ⇒ |f(x)−f(x₀)|<ε. This is the definition of",  # noqa: RUF001
    "... --- ... \t\t tabs\tand   many    spaces     and\n\n\nblank lines\n",
    'Q: Who wrote "Faust"?\nA: Goethe.\nQ: Who wrote "Hamlet"?\nA: Shakespeare.\nQ: "Emma"?\nA:',
)
PAGE = """\
The Tower of London stands on the north bank of the Thames, at the eastern edge of the old city. \
William the Conqueror ordered a fortress here soon after 1066, to watch over a town that he did \
not trust and a river on which its enemies could come. The White Tower, built of stone that was \
shipped from Caen, was finished some thirty years later, and for a long time no building in the \
country was higher. Its walls are up to fifteen feet thick at the base, and its only door was on \
the first floor, where a wooden stair could be taken away when an attack was feared.

Kings who came later drew two rings of walls around it. Henry III planted gardens, painted his \
rooms, and kept a menagerie: three leopards from the emperor, an elephant from the king of \
France, and a white bear from Norway, which was led on a long rope to the river so that it could \
fish. Edward I dug the moat, which was meant to be emptied and filled by the tide, and never was \
quite. In dry summers it stank so badly that the governor complained to the crown, and in 1843 \
it was drained.

It was a palace, a mint, an armoury and an archive, but people remember it as a prison. Many \
were brought by boat, through the water gate under St Thomas's Tower; some of them stayed a few \
nights, some thirty years, and a few left only for the scaffold. Prisoners of rank paid for \
their food and brought their own servants. Sir Walter Raleigh, who was shut up for thirteen \
years, grew tobacco on the walk in front of his room, wrote the first volume of a history of the \
world, and received so many guests that the lieutenant had to lock the gates against them.

Today six ravens live on the green. A legend, which is not much older than the last war, says \
that the kingdom will fall on the day they leave, so one wing of each is trimmed, and each has a \
name, a keeper and a ration of meat. One was dismissed for eating the aerials of television \
sets.
"""
_CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()


class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):"""
SPECULATED = {
    "code": _CODE,
    "summary": f"{PAGE}\nSummary of the text, in its own words: The Tower of London stands on",
    "story": "Once upon a time, in a village by the sea, there lived an old fisherman who",
}
"""Prompts by how much their completions repeat them."""


def prompts() -> list[str]:
    """Return 200 prompts of 1 to some 430 tokens: each text cut at five lengths."""
    texts = [*_LINES.splitlines(), *_BLOCKS, _CODE, PAGE]
    return [text[: max(1, len(text) * part // 5)] for text in texts for part in range(1, 6)]


def long_tail(
    encode: Callable[[str], list[int]], requests: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and greedy parameters: most are short, a few are ten times as long."""
    rng = Random(0)
    page = encode(PAGE * 2)
    prompts, params = [], []
    for _ in range(requests):
        length = min(int(rng.lognormvariate(2.7, 1.0)) + 1, 400)
        begin = rng.randrange(len(page) - length)
        prompts.append(page[begin : begin + length])
        new = min(int(rng.lognormvariate(2.0, 0.9)) + 1, 100)
        params.append(
            SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True, logprobs=True)
        )
    return prompts, params


def percentiles(lengths: Iterable[int]) -> str:
    """Return the median, the ninth decile and the maximum, in words."""
    each = sorted(lengths)
    return f"{median(each):.0f}, {quantiles(each, n=10)[-1]:.0f} and {each[-1]}"
