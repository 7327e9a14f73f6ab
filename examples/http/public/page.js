// One key per operation: it is made with the step that the page shows, kept while
// the outcome is unknown (over retries, reloads and in every tab), and dropped once
// there is an answer, be it a success or a refusal.
//
// All of it is one item in localStorage, written at once:
//   { key, sent }                cart:    sent is the body, once it was sent
//   { key, sent, order }         ordered: key is that of the payment
//   { order, payment }           paid
// A tab that reads an old state sends an old key, and gets that key's answer.

const attempts = 5;
const $ = (id) => document.getElementById(id);

function load() {
  return JSON.parse(localStorage.getItem('shop')) ?? save({ key: crypto.randomUUID() });
}

function save(state) {
  localStorage.setItem('shop', JSON.stringify(state));
  return state;
}

function render(message = '') {
  const { order, payment, sent } = load();
  $('cart').hidden = Boolean(order);
  $('ordered').hidden = !order;
  // what was sent and not answered must be asked for again as it was
  for (const name of ['item', 'quantity']) {
    const field = $('cart').elements.namedItem(name);
    field.disabled = Boolean(!order && sent);
    if (!order && sent) field.value = sent[name];
  }
  if (order) {
    $('summary').textContent = `Order ${order.order}: ${order.quantity} × ${order.item}, ${order.amount.toFixed(2)}`;
    $('pay').hidden = Boolean(payment);
    $('another').hidden = !payment;
    $('receipt').textContent = payment ? `Paid ${payment.amount.toFixed(2)}, receipt ${payment.payment}` : '';
  }
  $('message').textContent = message;
}

// Sends an operation until it is answered.  Resolves to the answer's status and
// body; undefined: no answer for now, which says nothing about the outcome.  To see
// it at work, #lose drops an answer that came.
async function send(url, key, body) {
  for (let attempt = 1; attempt <= attempts; attempt++) {
    if (attempt > 1) {
      const backoff = 100 * 2 ** (attempt - 1);
      await new Promise((resume) => setTimeout(resume, backoff / 2 + Math.random() * backoff / 2));
    }
    try {
      const response = await fetch(url, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json', 'Idempotency-Key': `"${key}"` },
        body: JSON.stringify(body),
        signal: AbortSignal.timeout(10_000),
      });
      if ($('lose').checked) {
        $('lose').checked = false;
        throw new Error('lost');
      }
      const replayed = response.headers.get('Idempotent-Replayed');
      note(url, key, attempt, response.status + (replayed ? `, Idempotent-Replayed: ${replayed}` : ''));
      if (response.status < 500 && !response.headers.has('Retry-After')) {
        return { ok: response.ok, status: response.status, body: await response.json() };
      }
    } catch {
      // no connection, or it broke: whether the server did it is not known
      note(url, key, attempt, 'no answer');
    }
  }
}

function note(url, key, attempt, result) {
  const line = document.createElement('li');
  line.textContent = `POST ${url}, key ${key.slice(0, 8)}…, attempt ${attempt}: ${result}`;
  document.querySelector('#wire ol').append(line);
}

// Runs the operation of the step that is shown.  next(state, answer) is the state
// that follows a success.
async function perform(button, url, state, body, next) {
  const sent = state.sent ?? body;
  save({ ...state, sent });
  button.disabled = true;
  $('message').textContent = '';
  const answer = await send(url, state.key, sent);
  button.disabled = false;

  if (!answer) return render('No answer yet. Press again: it cannot happen twice.');
  if (answer.status === 422) return render('This was sent from another tab, and not the same.');
  if (load().key !== state.key) return render(); // another tab had the answer first
  if (answer.ok) {
    save(next(answer.body));
    return render();
  }
  save({ ...state, key: crypto.randomUUID(), sent: undefined });
  return render(answer.body.error);
}

$('cart').addEventListener('submit', (event) => {
  event.preventDefault();
  const state = load();
  if (state.order) return render(); // ordered in another tab
  const [item, quantity] = ['item', 'quantity'].map((name) => $('cart').elements.namedItem(name).value);
  perform($('order'), '/orders', state, { item, quantity: Number(quantity) },
    (order) => ({ key: crypto.randomUUID(), order }));
});

$('pay').addEventListener('click', () => {
  const state = load();
  if (!state.order || state.payment) return render();
  perform($('pay'), `/orders/${state.order.order}/payment`, state, {},
    (payment) => ({ order: state.order, payment }));
});

$('another').addEventListener('click', () => {
  localStorage.removeItem('shop');
  render();
});

window.addEventListener('storage', () => render());
window.addEventListener('pageshow', () => render());
