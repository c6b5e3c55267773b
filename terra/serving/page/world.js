/** What kind of world the server's model is: a road to drive on (its actions are waypoints), or another one to play. */

const element = (id) => document.getElementById(id);

/** Shows the parts of the page that belong to worlds of this action space. */
export function showWorld({ kind }) {
  document.body.dataset.world = kind;
  if (isDriven()) return;
  element("overlay").title = "Show the actions on the picture (O)";
  element("stage").setAttribute("aria-label", "The view");
}

export const isDriven = () => document.body.dataset.world === "waypoints";
